"""One rank of the communication benchmark: all ways of one collective in turn, in the same processes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm.device import all_gather_single, reduce_scatter_single
from weft.comm.mesh import GroupView
from weft.comm.shared_memory import register_shared_memory_backend, shared_memory_group
from weft.comm.shared_memory.group import SharedMemoryGroup
from weft.run.launch import RankInfo, initialise_distributed
from weft.techniques.zero.shared_buffers import share_buffers

_BLOCK_SECONDS = 0.02
_MOST_CALLS = 200


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to do one collective of one size."""

    name: str
    call: Callable[[], Any]


def run_rank(rank_info: RankInfo, *, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Time every way of every collective, block by block, `rounds` times; seconds per call as this rank saw them.

    `sizes` in bytes.  Returns {collective: {way: {size: [seconds, …]}}}, and how the engine came to copy.
    """
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    with initialise_distributed("cpu", rank_info, backend="weft"):
        gloo = dist.new_group(backend="gloo")
        shared = shared_memory_group(dist.group.WORLD)
        assert isinstance(gloo, dist.ProcessGroup)
        assert shared is not None
        for size in sizes:
            for collective, ways in _ways(size, shared, gloo).items():
                for way, samples in _interleaved(ways, rounds).items():
                    found.setdefault(collective, {}).setdefault(way, {})[str(size)] = samples
        manner = shared.engine.manner
        told = {name: getattr(manner, name) for name in manner.__slots__}
        told["kernel_variant"] = shared.engine.kernel_variant
    return {"seconds": found, "manner": told}


def _ways(size: int, shared: SharedMemoryGroup, gloo: dist.ProcessGroup) -> dict[str, list[_Way]]:
    world = dist.get_world_size()
    count = size // 4 // world * world
    tensor, other = torch.ones(count), torch.ones(count)
    inside = shared.allocate(count).fill_(1.0)
    part, part_inside = torch.ones(count // world), inside[: count // world]
    mean = dist.ReduceOp.AVG  # of ones: the values stay what they are however often it is called
    at, engine = tensor.data_ptr(), shared.engine
    return {
        "all_reduce": [
            _Way("engine", lambda: engine.all_reduce(at, count * 4, 0, 1, 60.0)),
            _Way("weft", partial(dist.all_reduce, tensor, mean)),
            _Way("weft, tensor in shared memory", partial(dist.all_reduce, inside, mean)),
            _Way("gloo", partial(dist.all_reduce, tensor, dist.ReduceOp.MAX, group=gloo)),  # ones stay ones
            *_copies(tensor, other),
        ],
        "reduce_scatter": [
            _Way("weft", partial(reduce_scatter_single, part, tensor, op=mean)),
            _Way("weft, tensor in shared memory", partial(reduce_scatter_single, part, inside, op=mean)),
            _Way("gloo", partial(reduce_scatter_single, part, tensor, gloo)),
        ],
        "all_gather": [
            _Way("weft", partial(all_gather_single, tensor, part)),
            _Way("weft, tensor in shared memory", partial(all_gather_single, tensor, part_inside)),
            _Way("gloo", partial(all_gather_single, tensor, part, gloo)),
        ],
        "message": [
            _Way("weft", partial(_to_and_fro, tensor, None)),
            _Way("gloo", partial(_to_and_fro, tensor, gloo)),
        ],
    }


def _to_and_fro(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Between ranks 0 and 1, 2 and 3, ….  Both messages have the size."""
    rank = dist.get_rank()
    if rank % 2 == 0:
        dist.send(tensor, rank + 1, group=group)
        dist.recv(tensor, rank + 1, group=group)
    else:
        dist.recv(tensor, rank - 1, group=group)
        dist.send(tensor, rank - 1, group=group)


def _copies(tensor: Tensor, other: Tensor) -> list[_Way]:
    """What the memory allows while all ranks copy at once, by two ways of copying: the faster is the limit."""
    size = tensor.numel() * 4
    return [
        _Way("memcpy of libc", partial(ctypes.memmove, other.data_ptr(), tensor.data_ptr(), size)),
        _Way("memcpy of torch", partial(other.copy_, tensor)),
    ]


def _interleaved(ways: Sequence[_Way], rounds: int) -> dict[str, list[float]]:
    """Blocks of calls, each way in turn; the order turns by one from round to round.  All ranks make as many calls."""
    calls = {way.name: _calls_per_block(way) for way in ways}
    samples: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(rounds):
        first = turn % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls[way.name]):
                way.call()
            samples[way.name].append((time.perf_counter() - start) / calls[way.name])
    return samples


def _calls_per_block(way: _Way) -> int:
    way.call()
    dist.barrier()
    start = time.perf_counter()
    way.call()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return max(1, min(_MOST_CALLS, round(_BLOCK_SECONDS / max(seconds.item(), 1e-7))))


# ── a training step ───────────────────────────────────────────────────────────────────────────────────────────────────


class _Nothing:
    """Collectives that take no time, between buffers that are there already: what is left is `fully_shard`'s own work,
    above all copying parameters into its buffers and out of them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, ...], Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._buffers.setdefault(tuple(size), torch.zeros(*size, dtype=dtype, device=device))

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: Any, **__: Any) -> dist.Work:
        return _Done()


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


def fsdp_step(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """A contender: forward, backward and SGD of an 8.4 M-parameter model under torch's own FSDP2; no optimisation of
    Weft's but the backend and, with `shared_buffers`, where the buffers lie.  With `nothing_sent` every collective is
    done at once, and the losses mean nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    register_shared_memory_backend()
    dist.init_process_group(settings["backend"])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if settings["sharded"]:
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if settings.get("shared_buffers"):
            ranks = tuple(range(dist.get_world_size()))
            view = GroupView(ranks, dist.get_rank(), mesh.get_group())
            for module in (*model, model):
                share_buffers(module, view)
        if settings.get("nothing_sent"):
            for module in (*model, model):
                module.set_custom_all_gather(_Nothing())
                module.set_custom_reduce_scatter(_Nothing())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = torch.randn(16, 512, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(index: int) -> float:
        loss = model(given).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
