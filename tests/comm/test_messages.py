"""Our own collectives over messages: every algorithm, size, type and operation against a reference; bits; async."""

from __future__ import annotations

import gc
import itertools
import threading
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import Tensor

from weft.comm.algorithms import ALGORITHMS, flat
from weft.comm.mesh import GroupView
from weft.comm.messages import Messenger
from weft.errors import CollectiveError

SUM = dist.ReduceOp.SUM
SIZES = (1, 3, 13, 257, 1031)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
TYPES = (torch.float32, torch.int64, torch.bfloat16, torch.int8)
BITS = ("BAND", "BOR", "BXOR")
CASES = [
    *itertools.product(FLOATS, ("SUM", "AVG", "MIN", "MAX", "PRODUCT")),
    *itertools.product(INTEGERS, ("SUM", "MIN", "MAX", "PRODUCT", *BITS)),
    *itertools.product((torch.bool,), ("MIN", "MAX", "PRODUCT", *BITS)),
    *itertools.product((torch.complex64,), ("SUM", "AVG", "PRODUCT")),
]
ALL_REDUCES = [name for name, algorithm in ALGORITHMS.items() if "all_reduce" in algorithm.methods]


def cases(members: int) -> list[tuple[torch.dtype, str]]:
    """All of them at two ranks; at more a share that differs from world to world, for the sake of time."""
    stride = 1 if members <= 2 else members - 1
    return CASES[members % stride :: stride]


def world_view() -> GroupView:
    n = dist.get_world_size()
    return GroupView(tuple(range(n)), dist.get_rank(), dist.group.WORLD if n > 1 else None)


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Powers of two, so that sums and products of eight are exact in every type."""
    made = torch.tensor([1, -2, 2, -1, 1], dtype=torch.int64)
    whole = made[(torch.arange(size) * 3 + rank * 2) % 5]
    return (whole > 0) if dtype == torch.bool else whole.abs().to(dtype) if dtype == torch.uint8 else whole.to(dtype)


def expected(op: str, size: int, dtype: torch.dtype, members: int | None = None) -> Tensor:
    """The reduction over the first ranks; by default over all."""
    stacked = [values(rank, size, dtype) for rank in range(members or dist.get_world_size())]
    total = stacked[0]
    for other in stacked[1:]:
        if dtype == torch.bool:
            total = {"PRODUCT": total & other, "MIN": total & other, "BAND": total & other, "BXOR": total ^ other}.get(
                op, total | other
            )
        elif op in BITS:
            total = {"BAND": total & other, "BOR": total | other, "BXOR": total ^ other}[op]
        elif op in ("MIN", "MAX"):
            total = torch.minimum(total, other) if op == "MIN" else torch.maximum(total, other)
        else:
            total = total * other if op == "PRODUCT" else total + other
    return total / len(stacked) if op == "AVG" else total


def variants(name: str, members: int) -> list[dict[str, object]]:
    """Ways to call an algorithm: groupings, pieces, servers."""
    if name.startswith("hierarchical") and members > 2:
        return [{"arrangement": flat(members, nodes=(2, members - 2))}, {}]
    if name == "double_tree":
        return [{"pieces": 1}, {"pieces": 3}]
    if name == "parameter_server":
        return [{"servers": 1}, {"servers": members}]
    return [{}]


def all_reduce_everything() -> int:
    view, count = world_view(), 0
    with Messenger(view) as messenger:
        names = [*ALL_REDUCES, "hierarchical+direct", "hierarchical+recursive_doubling"]
        for name in names:
            for options in variants(name, view.size):
                for (dtype, op), size in zip(cases(view.size), itertools.cycle(SIZES), strict=False):
                    tensor = values(view.index, size, dtype)
                    messenger.run(tensor, "all_reduce", name, op=getattr(dist.ReduceOp, op), **options)  # type: ignore[arg-type]
                    assert torch.equal(tensor, expected(op, size, dtype)), (name, options, dtype, op, size)
                    count += 1
                for size in (0, 1, 257):
                    tensor = values(view.index, size, torch.float32).view(1, size)
                    messenger.run(tensor, "all_reduce", name, **options)  # type: ignore[arg-type]
                    assert torch.equal(tensor[0], expected("SUM", size, torch.float32)), (name, size)
    return count


@pytest.mark.parametrize("world", range(1, 9))
def test_every_all_reduce_with_every_type_and_operation(ranks: RankPool, world: int) -> None:
    assert min(ranks.run(world, all_reduce_everything, timeout=120)) >= 15 * len(cases(world))


def scatter_everything() -> int:
    view, count = world_view(), 0
    names = [name for name, algorithm in ALGORITHMS.items() if "reduce_scatter" in algorithm.methods]
    sizes = itertools.cycle(SIZES)
    with Messenger(view) as messenger:
        for name in [*names, "hierarchical+double_ring"]:
            for options in variants(name, view.size):
                for (dtype, op), size in zip(cases(view.size), sizes, strict=False):
                    tensor, mine = values(view.index, size, dtype), region(view.index, size, view.size)
                    messenger.run(tensor, "reduce_scatter", name, op=getattr(dist.ReduceOp, op), **options)  # type: ignore[arg-type]
                    assert torch.equal(tensor[mine], expected(op, size, dtype)[mine]), (name, options, dtype, op, size)
                    count += 1
    return count


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_every_reduce_scatter_with_every_type_and_operation(ranks: RankPool, world: int) -> None:
    assert min(ranks.run(world, scatter_everything, timeout=120)) >= 8 * len(cases(world))


def region(rank: int, size: int, members: int) -> slice:
    share, longer = divmod(size, members)
    start = rank * share + min(rank, longer)
    return slice(start, start + share + (rank < longer))


def uneven(size: int, members: int) -> list[tuple[int, int]]:
    """Everything to the last but one rank and a little to the first; nothing to the others."""
    stops = [0] * members
    for rank in range(members):
        stops[rank] = size if rank >= members - 2 else min(1, size)
    return list(zip([0, *stops[:-1]], stops, strict=True))


def regions_of_everything() -> None:
    view = world_view()
    n, me = view.size, view.index
    with Messenger(view) as messenger:
        for name, algorithm in ALGORITHMS.items():
            for options in variants(name, n):
                for size, dtype in zip((0, *SIZES), itertools.cycle(TYPES), strict=False):
                    total = expected("SUM", size, dtype)
                    for bounds in (None, uneven(size, n)):
                        mine = slice(*bounds[me]) if bounds else region(me, size, n)
                        tensor = values(me, size, dtype)
                        if "reduce_scatter" in algorithm.methods:
                            messenger.run(tensor, "reduce_scatter", name, regions=bounds, **options)  # type: ignore[arg-type]
                            assert torch.equal(tensor[mine], total[mine]), (name, size, dtype, bounds)
                        if "all_gather" in algorithm.methods:
                            tensor = torch.zeros(size, dtype=dtype)
                            tensor[mine] = total[mine]
                            messenger.run(tensor, "all_gather", name, regions=bounds, **options)  # type: ignore[arg-type]
                            assert torch.equal(tensor, total), (name, size, dtype, bounds)
                    if "broadcast" in algorithm.methods:
                        for root in {0, n // 2, n - 1}:
                            tensor = values(me, size, dtype)
                            messenger.run(tensor, "broadcast", name, root=root, **options)  # type: ignore[arg-type]
                            assert torch.equal(tensor, values(root, size, dtype)), (name, size, root)
                    if "all_to_all" in algorithm.methods:
                        tensor = torch.arange(n * size).view(n, size).add(1000 * n * size * me).to(dtype)
                        messenger.run(tensor, "all_to_all", name, **options)  # type: ignore[arg-type]
                        wanted = torch.arange(size) + me * size + (1000 * n * size * torch.arange(n))[:, None]
                        assert torch.equal(tensor, wanted.to(dtype)), (name, size)


@pytest.mark.parametrize("world", range(1, 9))
def test_every_other_collective(ranks: RankPool, world: int) -> None:
    ranks.run(world, regions_of_everything, timeout=120)


def bits_of_sums() -> list[list[int]]:
    view = world_view()
    generator = torch.Generator().manual_seed(view.index)
    found: list[list[int]] = []
    with Messenger(view) as messenger:
        for name in [*ALL_REDUCES, "hierarchical+one_shot"]:
            for options in variants(name, view.size):
                for dtype, kind in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
                    tensor = torch.randn(999, generator=generator).to(dtype)
                    exact = tensor.double()
                    dist.all_reduce(exact)
                    messenger.run(tensor, "all_reduce", name, **options)  # type: ignore[arg-type]
                    assert (tensor.double() - exact).abs().max() < (1e-5 if dtype == torch.float32 else 0.3)
                    found.append(tensor.view(kind).tolist())
    return found


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_all_ranks_get_the_same_bits(ranks: RankPool, world: int) -> None:
    found = ranks.run(world, bits_of_sums)
    assert all(other == found[0] for other in found[1:])


# ── asynchronous ──────────────────────────────────────────────────────────────────────────────────────────────────────


def many_under_way() -> list[float]:
    view = world_view()
    with Messenger(view) as messenger:
        tensors = [torch.full((5000,), float(index)) for index in range(12)]
        names = itertools.cycle(("ring", "tree", "direct", "double_tree"))
        waits = [messenger.start(tensor, "all_reduce", name) for tensor, name in zip(tensors, names, strict=False)]
        for wait in reversed(waits):
            wait()
            wait()  # waiting again does nothing
    return [tensor.mean().item() for tensor in tensors]


def test_several_are_under_way_at_a_time(ranks: RankPool) -> None:
    assert ranks.run(3, many_under_way) == [[3.0 * index for index in range(12)]] * 3


def progress_in_the_background() -> tuple[float, float]:
    view = world_view()
    with Messenger(view) as messenger:
        messenger.run(torch.ones(1), "all_reduce", "ring")
        tensor = torch.ones(1 << 20)
        started = time.monotonic()
        wait = messenger.start(tensor, "all_reduce", "ring")
        called = time.monotonic() - started
        time.sleep(2.0)
        before = time.monotonic()
        wait()
        assert tensor[0] == view.size
        return called, time.monotonic() - before


def test_a_collective_goes_on_while_nobody_waits(ranks: RankPool) -> None:
    for called, waited in ranks.run(2, progress_in_the_background):
        assert called < 0.5
        assert waited < 0.5


def threads_afterwards() -> int:
    before = threading.active_count()
    view = world_view()
    closed, forgotten = Messenger(view), Messenger(view)
    closed.run(torch.ones(3), "all_reduce", "ring")
    closed.close()
    closed.close()
    with pytest.raises(CollectiveError, match="messenger that is closed"):
        closed.run(torch.ones(3), "all_reduce", "ring")
    del forgotten
    gc.collect()
    stop = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < stop:
        time.sleep(0.01)
    return threading.active_count() - before


def test_no_thread_is_left(ranks: RankPool) -> None:
    assert ranks.run(2, threads_afterwards) == [0, 0]


def part_of_the_world() -> float:
    """Groups of ranks 0, 2 and 1, 3: peers are numbered within the group."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    view = GroupView((rank % 2, rank % 2 + 2), rank // 2, groups[rank % 2])
    with Messenger(view) as messenger:
        return messenger.run(torch.tensor([float(rank)]), "all_reduce", "halving_doubling").item()


def test_groups_within_the_world(ranks: RankPool) -> None:
    assert ranks.run(4, part_of_the_world) == [2.0, 4.0, 2.0, 4.0]


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tensor", "collective", "options", "message"),
    [
        (torch.ones(2, dtype=torch.bool), "all_reduce", {}, "SUM is not defined for torch.bool. It has PRODUCT, MIN"),
        (torch.ones(2, dtype=torch.int8), "all_reduce", {"op": dist.ReduceOp.AVG}, "AVG is not defined for torch.int8"),
        (torch.ones(2), "all_reduce", {"op": dist.ReduceOp.BOR}, "BOR is not defined for torch.float32. It has SUM"),
        (torch.ones(2, dtype=torch.uint16), "all_reduce", {}, "not defined for torch.uint16. Cast it first"),
        (torch.ones(4, 4).t()[1:], "all_reduce", {}, r"shape \[3, 4\] is not contiguous"),
        (torch.ones(2), "all_reduce", {"regions": [(0, 2)]}, "all_reduce works on the whole tensor: leave regions out"),
        (torch.ones(2), "all_gather", {"regions": [(0, 1)]}, "must stand side by side, one for each of 1 ranks"),
        (torch.ones(2), "all_reduce", {"timeout_seconds": 0}, "timeout_seconds = 0: use more than 0"),
    ],
)
def test_calls_that_make_no_sense(tensor: Tensor, collective: str, options: dict[str, object], message: str) -> None:
    with Messenger(GroupView((0,), 0, None)) as messenger, pytest.raises(CollectiveError, match=message):
        messenger.run(tensor, collective, "ring", **options)  # type: ignore[arg-type]


def uneven_all_to_all() -> None:
    with Messenger(world_view()) as messenger, pytest.raises(CollectiveError, match="Pad the tensor to 6"):
        messenger.run(torch.ones(5), "all_to_all", "direct")


def test_all_to_all_needs_equal_regions(ranks: RankPool) -> None:
    ranks.run(2, uneven_all_to_all)
