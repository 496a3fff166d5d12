"""What torch builds on process groups, over shared memory, beside Gloo: the same results, by the shared memory."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from pool import RankPool
from shared_memory_jobs import group
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from weft.comm.shared_memory import shared_memory_group
from weft.errors import CollectiveError
from weft.run.launch import RankInfo, initialise_distributed
from weft.run.launch.launcher import launch_function

WEFT = "cpu:weft"
T = TypeVar("T")


def brief(world: int, function: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
    """Run in processes that end: torch's plans of DTensors, and what Dynamo compiled, keep their groups for ever."""
    with closing(RankPool(world)) as pool:
        return pool.run(world, function, *args, timeout=timeout, backend=WEFT)


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 7))


def _train(wrap: Callable[[nn.Module], nn.Module], steps: int = 3) -> list[Tensor]:
    model = wrap(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def _ddp(where: dist.ProcessGroup | None) -> Callable[[nn.Module], nn.Module]:
    return lambda model: DistributedDataParallel(model, process_group=where, bucket_cap_mb=0.01)


def _fsdp(where: dist.ProcessGroup | None) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        chosen = where or dist.group.WORLD
        assert chosen is not None
        mesh = DeviceMesh.from_group(chosen, "cpu", mesh_dim_names=("shard",))
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return wrap


def _as_gloo(kind: str) -> tuple[bool, dict[str, int]]:
    gloo = dist.new_group(backend="gloo")
    wrap = {"ddp": _ddp, "fsdp": _fsdp}[kind]
    ours, theirs = _train(wrap(None)), _train(wrap(gloo))
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), dict(group().served)


@pytest.mark.parametrize(
    ("kind", "methods"),
    [("ddp", {"allreduce", "broadcast"}), ("fsdp", {"reduce_scatter_single", "all_gather_single"})],
)
def test_training_is_that_on_gloo_to_the_bit(kind: str, methods: set[str]) -> None:
    for is_same, served in brief(2, _as_gloo, kind):
        assert is_same
        assert methods <= served.keys(), "Gloo did it"


def _dtensors() -> tuple[bool, dict[str, int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    whole = torch.arange(96.0).view(8, 12)
    cut = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    rights = [torch.equal(cut.full_tensor(), whole)]
    turned = cut.redistribute(placements=[Shard(1), Replicate()])
    rights.append(torch.equal(turned.full_tensor(), whole))
    product = cut @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Shard(0)])
    rights.append(torch.equal(product.full_tensor(), whole @ whole.t()))
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial(), Partial()])
    rights.append(torch.equal(partial.full_tensor(), torch.full((4, 4), 4.0)))
    scattered = partial.redistribute(placements=[Shard(0), Replicate()])
    rights.append(torch.equal(scattered.full_tensor(), torch.full((4, 4), 4.0)))
    served = [shared_memory_group(mesh.get_group(name)) for name in ("rows", "columns")]
    counts = {name: count for found in served if found is not None for name, count in found.served.items()}
    return all(rights), counts


def test_tensors_over_a_mesh_of_two_axes() -> None:
    for is_right, served in brief(4, _dtensors):
        assert is_right
        assert {"all_gather_single_coalesced", "allreduce"} & served.keys(), "Gloo did it"


def _functional() -> tuple[list[bool], set[str]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(6.0) + rank
    both = torch.arange(6.0) * 2 + 1
    everyone = group()
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # renamed in 2.13
    scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    rights = [
        torch.equal(functional.all_reduce(mine, "sum", everyone).wait(), both),
        torch.equal(functional.all_reduce(mine, "avg", everyone).wait(), both / 2),
        torch.equal(
            gather(mine, 0, everyone).wait(),
            torch.cat([torch.arange(6.0), torch.arange(6.0) + 1]),
        ),
        torch.equal(scatter(mine, "sum", 0, everyone).wait(), both[3 * rank : 3 * rank + 3]),
        torch.equal(
            functional.all_to_all_single(mine, [3, 3], [3, 3], everyone).wait(),
            torch.cat([torch.arange(6.0)[3 * rank : 3 * rank + 3] + source for source in range(world)]),
        ),
        torch.equal(functional.broadcast(mine, 1, everyone).wait(), torch.arange(6.0) + 1),
        all(
            torch.equal(found.wait(), wanted)
            for found, wanted in zip(
                functional.all_reduce_coalesced([mine, 2 * mine], "sum", everyone), (both, 2 * both), strict=True
            )
        ),
    ]
    return rights, set(group().served)


def test_functional_collectives(ranks: RankPool) -> None:
    for rights, served in ranks.run(2, _functional, backend=WEFT):
        assert rights == [True] * 7
        assert served >= {
            *("allreduce", "all_gather_single_coalesced", "reduce_scatter_single_coalesced", "all_to_all_single"),
            *("broadcast", "allreduce_coalesced"),
        }


def _messages() -> bool:
    """Sends and receives, which Gloo carries, beside collectives."""
    rank = dist.get_rank()
    there = torch.full((1_000,), float(rank))
    here = torch.empty(1_000)
    ops = [dist.P2POp(dist.isend, there, 1 - rank), dist.P2POp(dist.irecv, here, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.all_reduce(there, async_op=True).wait()
    if rank == 0:
        dist.send(here, 1)
    else:
        dist.recv(here, 0)
    return torch.equal(here, torch.ones(1_000)) and there[0].item() == 1.0


def test_messages_go_by_gloo(ranks: RankPool) -> None:
    assert ranks.run(2, _messages, backend=WEFT) == [True, True]


def _subgroups() -> list[Any]:
    """Groups of some ranks, and collectives whose roots are named by global rank."""
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    outcome: list[Any] = []
    if rank in (1, 2):
        value = torch.tensor([float(rank)])
        dist.broadcast(value, src=2, group=pair)
        outcome.append(value.item())
        dist.all_reduce(value, group=pair)
        outcome.append(value.item())
        assert shared_memory_group(pair) is not None
        outcome.append(dist.get_backend_config(pair))
    dist.barrier()
    return outcome


def test_groups_of_some_ranks(ranks: RankPool) -> None:
    found = [2.0, 4.0, "cpu:weft"]
    assert ranks.run(3, _subgroups, backend=WEFT) == [[], found, found]


def _ddp_hooks() -> bool:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model = DistributedDataParallel(copy.deepcopy(_model()))
    state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)
    for _ in range(4):
        model(torch.randn(8, 40)).square().mean().backward()
    every = [torch.empty(64, 40) for _ in range(2)]
    first = next(model.parameters()).grad
    assert first is not None
    dist.all_gather(every, first)
    return torch.equal(every[0], every[1])


def test_hooks_of_ddp(ranks: RankPool) -> None:
    assert ranks.run(2, _ddp_hooks, backend=WEFT) == [True, True]


def _gradients(register: Callable[[DistributedDataParallel], object]) -> list[Tensor]:
    model = DistributedDataParallel(copy.deepcopy(_model()), bucket_cap_mb=0.01)
    register(model)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _hooks_in_cpp_and_python() -> dict[str, float]:
    """The largest difference from plain DDP, relative to its gradient's largest value, by hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    plain = _gradients(lambda model: None)
    hooks: dict[str, Callable[[DistributedDataParallel], object]] = {
        **{
            f"built-in {kind.name}": lambda model, kind=kind: model._register_builtin_comm_hook(kind)
            for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS)
        },
        "allreduce": lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
        "fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "wrapped": lambda model: model.register_comm_hook(
            None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
        ),
    }
    return {
        name: max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(_gradients(register), plain, strict=True))
        for name, register in hooks.items()
    }


def test_hooks_that_torch_brings(ranks: RankPool) -> None:
    """Those in C++ want futures of lists of tensors."""
    for differences in ranks.run(2, _hooks_in_cpp_and_python, backend=WEFT):
        assert len(differences) == 5
        assert max(differences.values()) < 2e-3
        assert differences["built-in ALLREDUCE"] == differences["allreduce"] == 0
        assert differences["built-in FP16_COMPRESS"] == differences["fp16"] > 0


def _half_that_fails() -> str:
    """The error of an all-reduce of fp16 reaches who waits for its future."""
    other = dist.new_group(timeout=timedelta(seconds=0.4))
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    future = dist.all_reduce(torch.ones(4, dtype=torch.float16), group=other, async_op=True).get_future()
    with pytest.raises(RuntimeError, match="rank 1 has not come") as caught:
        future.wait()
    dist.barrier()
    return str(caught.value)


def test_a_future_of_half_precision_fails_with_the_reason(ranks: RankPool) -> None:
    assert "timed out" in ranks.run(2, _half_that_fails, backend=WEFT)[0]


def _profiled() -> list[tuple[str, bool, list[list[int]]]]:
    rank = dist.get_rank()
    first, second, parts = torch.ones(3, 4), torch.ones(5), [torch.empty(3, 4) for _ in range(2)]
    with torch.profiler.profile(record_shapes=True) as profiler:
        one, two = dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)
        two.wait()
        one.wait()
        dist.all_gather(parts, first)
        if rank == 0:  # the second is received before the first comes: nobody waits for the wrong one
            late = dist.irecv(torch.empty(2), 1)
            dist.isend(torch.ones(2), 1).wait()
            dist.send(second, 1)
            late.wait()
        else:
            dist.recv(torch.empty(2), 0)
            dist.recv(torch.empty(5), 0)
            dist.send(torch.ones(2), 0)
        forgotten = dist.all_reduce(second, async_op=True)
        del forgotten
        dist.barrier()
        with pytest.raises(CollectiveError, match="is not defined"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    first.add_(0)  # nothing is told of what comes after
    dist.all_reduce(first)
    return [(event.name, event.is_async, event.input_shapes) for event in profiler.events() if "weft:" in event.name]


def test_profilers_see_collectives(ranks: RankPool) -> None:
    for events in ranks.run(2, _profiled, backend=WEFT):
        shown = [(name, shapes) for name, is_async, shapes in events if is_async]
        assert [name for name, is_async, _ in events if not is_async].count("weft:wait(all_reduce)") == 2
        assert shown[:3] == [("weft:all_reduce", [[3, 4]]), ("weft:all_reduce", [[5]]), ("weft:all_gather", [[3, 4]])]
        names = [name for name, _ in shown]
        assert names.count("weft:all_reduce") == 4  # a forgotten and a refused one among them
        assert names.count("weft:send") + names.count("weft:recv") == 3
        assert names.count("weft:barrier") == 1


def _under_way_when_profilers_end(folder: str) -> int:
    """Windows that end while reductions are under way; return the number of traces that were written."""
    rank, values = dist.get_rank(), torch.ones(1 << 18)
    traces: list[Path] = []
    for window in range(12):
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        profiler.start()
        works = [dist.all_reduce(torch.ones(64), async_op=True) for _ in range(64)]
        for _ in range(200):
            values = values * 1.0001
        works += [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(16)]
        profiler.stop()
        for work in works:
            work.wait()
        traces.append(Path(folder) / f"{window}-{rank}.json")
        profiler.export_chrome_trace(str(traces[-1]))
    return sum(path.stat().st_size > 0 for path in traces)


def test_a_profiler_may_end_before_collectives_do(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, _under_way_when_profilers_end, str(tmp_path), backend=WEFT) == [12, 12]


def _compiled_ddp() -> bool:
    """DDP sends a model's buffers in the middle of a compiled forward."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    found: list[list[Tensor]] = []
    for is_compiled in (False, True):
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        step = torch.compile(wrapped, backend="aot_eager") if is_compiled else wrapped
        for batch in range(3):
            generator = torch.Generator().manual_seed(10 * batch + dist.get_rank())
            step(torch.randn(8, 8, generator=generator)).square().sum().backward()
        gradients = [parameter.grad for parameter in wrapped.parameters() if parameter.grad is not None]
        found.append([*gradients, *(buffer.clone() for buffer in wrapped.buffers())])
    return all(torch.allclose(a, b) for a, b in zip(*found, strict=True))


def _compiled() -> Tensor:
    def step(value: Tensor) -> Tensor:
        return functional.all_reduce(value * 2, "sum", group()) + 1

    return torch.compile(step, backend="aot_eager")(torch.ones(5) * (1 + dist.get_rank()))


def _waited_for(x: Tensor) -> Tensor:
    """Dynamo sees the work of an asynchronous collective, which is a class in Python, and its `wait`."""
    x = x * 2
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x


def compiled_rank(rank_info: RankInfo) -> tuple[list[float], bool]:
    with initialise_distributed("cpu", rank_info, backend="weft"):
        waited = torch.compile(_waited_for, backend="aot_eager")(torch.ones(3))
        assert waited.tolist() == _waited_for(torch.ones(3)).tolist() == [dist.get_world_size() * 2.0] * 3
        return _compiled().tolist(), _compiled_ddp()


def test_compiled_collectives_and_a_compiled_model_with_buffers() -> None:
    """In processes that end by themselves: Dynamo's helpers leave semaphores where a rank is killed."""
    here = [str(Path(__file__).parent), *sys.path]
    found = launch_function("test_shared_memory_torch:compiled_rank", {}, 2, import_path=here)
    assert found == [[[7.0] * 5, True]] * 2
