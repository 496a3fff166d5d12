"""What ranks do in the tests of the shared-memory backend."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.device import all_gather_single, reduce_scatter_single
from weft.comm.shared_memory import shared_memory_group
from weft.comm.shared_memory.group import SharedMemoryGroup

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
ARITHMETIC = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")
WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def group() -> SharedMemoryGroup:
    """The default group, which must be over shared memory."""
    found = shared_memory_group(dist.group.WORLD)
    assert found is not None, "this group is not over shared memory"
    return found


def data_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    low = 0 if dtype is torch.uint8 else -9
    return torch.randint(low, 10, (size,), generator=generator).to(dtype)


def reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    """In the order of the ranks, half precision in fp32 and rounded once."""
    dtype = parts[0].dtype
    total = parts[0].to(WIDE.get(dtype, dtype), copy=True)
    for part in parts[1:]:
        other = part.to(total.dtype)
        total = {
            "SUM": torch.add,
            "AVG": torch.add,
            "PRODUCT": torch.mul,
            "MIN": torch.minimum,
            "MAX": torch.maximum,
            "BAND": torch.bitwise_and,
            "BOR": torch.bitwise_or,
            "BXOR": torch.bitwise_xor,
        }[op](total, other)
    if op == "AVG":
        total = total.div(len(parts), rounding_mode=None if dtype.is_floating_point else "trunc")
    return total.to(dtype)


def everyones(size: int, dtype: torch.dtype) -> list[Tensor]:
    return [data_of(rank, size, dtype) for rank in range(dist.get_world_size())]


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, and NaN where a NaN is due."""
    return found.dtype == expected.dtype and torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def reductions(cases: Sequence[tuple[torch.dtype, str]], sizes: Sequence[int]) -> list[str]:
    """All-reduce, reduce-scatter (of unequal regions) and reduce; what is wrong, by name."""
    wrong: list[str] = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype, op in cases:
        for size in sizes:
            expected = reduced(everyones(size, dtype), op)
            mine = data_of(rank, size, dtype)
            dist.all_reduce(mine, getattr(dist.ReduceOp, op))
            if not same(mine, expected):
                wrong.append(f"all_reduce {dtype} {op} {size}")
            work = dist.all_reduce(again := data_of(rank, size, dtype), getattr(dist.ReduceOp, op), async_op=True)
            work.wait()
            if not same(again, expected):
                wrong.append(f"asynchronous all_reduce {dtype} {op} {size}")
            cuts = [size * i * i // (world * world) for i in range(world + 1)]
            given = data_of(rank, size, dtype)
            parts = [given[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
            group().reduce_scatter_regions(parts, parts[rank], getattr(dist.ReduceOp, op)).wait()
            if not same(parts[rank], expected[cuts[rank] : cuts[rank + 1]]):
                wrong.append(f"reduce_scatter_regions {dtype} {op} {size}")
            to_root, root = data_of(rank, size, dtype), size % world
            dist.reduce(to_root, root, getattr(dist.ReduceOp, op))
            if not same(to_root, expected if rank == root else data_of(rank, size, dtype)):
                wrong.append(f"reduce {dtype} {op} {size}")
    return wrong


def movements(dtypes: Sequence[torch.dtype], sizes: Sequence[int]) -> list[str]:
    """Everything that moves without summing, and the even reduce-scatters; what is wrong, by name."""
    wrong: list[str] = []
    for dtype in dtypes:
        for size in sizes:
            wrong += [f"{name} {dtype} {size}" for name in _movement(dtype, size)]
    return wrong


def _movement(dtype: torch.dtype, size: int) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    every = everyones(size, dtype)
    checks: dict[str, bool] = {}
    whole = torch.empty(world * size, dtype=dtype)
    all_gather_single(whole, every[rank].clone())
    checks["all_gather_single"] = same(whole, torch.cat(every))
    outputs = [torch.empty_like(part) for part in every]
    dist.all_gather(outputs, every[rank].clone())
    checks["all_gather"] = all(same(a, b) for a, b in zip(outputs, every, strict=True))
    uneven = [data_of(other, size * other // world, dtype) for other in range(world)]
    taken = [torch.empty_like(part) for part in uneven]
    group().all_gather_regions(uneven[rank].clone(), taken).wait()
    checks["all_gather_regions"] = all(same(a, b) for a, b in zip(taken, uneven, strict=True))
    sent = every[rank].clone()
    dist.broadcast(sent, world - 1)
    checks["broadcast"] = same(sent, every[-1])
    root = size % world
    gathered = [torch.empty_like(part) for part in every] if rank == root else None
    dist.gather(every[rank].clone(), gathered, dst=root)
    checks["gather"] = gathered is None or all(same(a, b) for a, b in zip(gathered, every, strict=True))
    scattered = torch.empty_like(every[0])
    dist.scatter(scattered, [part.clone() for part in every] if rank == root else None, src=root)
    checks["scatter"] = same(scattered, every[rank])
    checks["all_to_all_single"] = _all_to_all_single(dtype, size)
    outputs = [torch.empty(size, dtype=dtype) for _ in range(world)]
    dist.all_to_all(outputs, [data_of(rank * world + other, size, dtype) for other in range(world)])
    checks["all_to_all"] = all(same(part, data_of(o * world + rank, size, dtype)) for o, part in enumerate(outputs))
    if dtype is not torch.bool:
        part = torch.empty(size, dtype=dtype)
        reduce_scatter_single(part, data_of(rank, size * world, dtype))
        checks["reduce_scatter_single"] = same(
            part, reduced(everyones(size * world, dtype), "SUM")[rank * size : (rank + 1) * size]
        )
    dist.barrier()
    return [name for name, is_right in checks.items() if not is_right]


def _all_to_all_single(dtype: torch.dtype, size: int) -> bool:
    """Rank `a` sends `size·(a + b) / world` rows of 3 to rank `b`."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def rows(source: int, to: int) -> Tensor:
        return data_of(source * world + to, 3 * (size * (source + to) // world), dtype).view(-1, 3)

    given, taken = [rows(rank, to) for to in range(world)], [rows(source, rank) for source in range(world)]
    output = torch.empty(sum(map(len, taken)), 3, dtype=dtype)
    dist.all_to_all_single(output, torch.cat(given), [len(part) for part in taken], [len(part) for part in given])
    return same(output, torch.cat(taken))


def traces() -> dict[str, int]:
    """What a group leaves behind in this process while it lives."""
    descriptors = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    return {
        "descriptors": len(descriptors),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": sum("memfd:weft" in line for line in open("/proc/self/maps")),  # noqa: SIM115 - read at once
    }


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")
