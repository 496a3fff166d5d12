"""Every collective is seen once: whoever starts it, with its axis and bytes, and when it ran and was waited for."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from pool import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from weft.comm.algorithms import parse_choices
from weft.comm.device import all_gather_single, reduce_scatter_single
from weft.comm.mesh import Mesh
from weft.comm.reduce import start_all_gather, start_reduce_scatter
from weft.comm.selector import ChosenCollectives
from weft.comm.shared_memory import shared_memory_group
from weft.comm.trace_event import TraceEvent
from weft.comm.watched_group import WatchedGroup, hold
from weft.config.plan import MeshPlan
from weft.errors import CollectiveError
from weft.techniques.compression.codecs._exchange import start_all_to_all

CPU = torch.device("cpu")
BACKENDS = ("gloo", "cpu:weft")
Row = tuple[str, str, int]


def _mesh(**axes: int) -> tuple[Mesh, list[TraceEvent]]:
    mesh = Mesh(MeshPlan(**axes), CPU)
    found: list[TraceEvent] = []
    mesh.watch(found.append)
    return mesh, found


def _await_end(seen: TraceEvent, patience_s: float = 20.0) -> None:
    """A future wakes who waits for it before it calls back, from a thread that has no need to hurry."""
    give_up = time.monotonic() + patience_s
    while not seen.is_done_exact:
        assert time.monotonic() < give_up, f"the end of {seen.operation} was never seen"
        time.sleep(0.001)


def _rows(found: list[TraceEvent]) -> list[Row]:
    for seen in found:
        if not seen.is_over:  # whoever waits for a future is not seen
            _await_end(seen)
            continue
        assert seen.launched_ns <= seen.wait_entered_ns <= seen.wait_exited_ns
        assert seen.launched_ns <= seen.done_ns <= seen.wait_exited_ns
        assert 0 <= seen.exposed_ns <= seen.wait_exited_ns - seen.wait_entered_ns
    return [(seen.axis, seen.operation, seen.num_bytes) for seen in found]


def _every_operation() -> list[Row]:
    mesh, found = _mesh(replicate=2)
    view = mesh["replicate"]
    group, other = view.group, view.ranks[1 - view.index]
    assert group is not None
    flat, both = torch.full((3,), view.index + 1.0), torch.zeros(6)
    dist.all_reduce(flat, group=group)
    assert flat.tolist() == [3.0] * 3
    all_gather_single(both, flat, group)
    reduce_scatter_single(flat, both, group)
    assert flat.tolist() == [6.0] * 3
    dist.broadcast(flat, view.ranks[0], group=group)
    dist.reduce(flat, view.ranks[0], group=group)
    dist.all_gather([torch.zeros(3), torch.zeros(3)], flat, group=group)
    dist.all_to_all_single(both.clone(), both, group=group)
    dist.gather(flat, [torch.zeros(3)] * 2 if view.index == 0 else None, dst=view.ranks[0], group=group)
    dist.scatter(flat, [flat.clone()] * 2 if view.index == 0 else None, src=view.ranks[0], group=group)
    if view.index:
        dist.send(flat, other, group=group)
    else:
        dist.recv(flat, group=group)  # from whoever sends
    dist.barrier(group=group)
    summed = functional.all_reduce(flat, "sum", group)
    functional.wait_tensor(summed)
    group.allreduce_coalesced([flat, both]).wait()  # torch deprecates its own name for it
    return _rows(found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_operation_is_seen_once(ranks: RankPool, backend: str) -> None:
    expected = [
        ("all_reduce", 12),
        ("all_gather", 24),
        ("reduce_scatter", 24),
        ("broadcast", 12),
        ("reduce", 12),
        ("all_gather", 24),
        ("all_to_all", 24),
        ("gather", 12),
        ("scatter", 12),
        ("message", 12),
        ("barrier", 0),
        ("all_reduce", 12),
        ("all_reduce", 36),
    ]
    for rank, rows in enumerate(ranks.run(2, _every_operation, backend=backend)):
        message = "send" if rank else "receive"
        wanted = [("replicate", message if what == "message" else what, size) for what, size in expected]
        assert rows == wanted


def _axes() -> tuple[list[Row], set[bool]]:
    mesh, found = _mesh(replicate=2, tensor=2)
    for name in ("replicate", "shard", "tensor", "data", "world"):
        group = mesh[name].group
        if group is not None:
            dist.all_reduce(torch.ones(1), group=group)
    mesh.watch(None)
    dist.all_reduce(torch.ones(1), group=mesh["world"].group)
    kinds = {isinstance(mesh[name].group, WatchedGroup) for name in ("replicate", "tensor", "data", "world")}
    return _rows(found), kinds


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_go_by_their_axis(ranks: RankPool, backend: str) -> None:
    for rows, kinds in ranks.run(4, _axes, backend=backend):
        assert [axis for axis, *_ in rows] == ["replicate", "tensor", "data", "world"]
        assert kinds == {True}


def _own_collectives() -> list[Row]:
    mesh, found = _mesh(replicate=3)
    view = mesh["replicate"]
    flat = torch.arange(10, dtype=torch.float32)
    regions = [(0, 4), (4, 7), (7, 10)]
    start_reduce_scatter(flat, regions, view, even=False)()
    start_all_gather(flat, regions, view, even=False)()
    incoming = torch.zeros(3, 2, dtype=torch.uint8)
    start_all_to_all(torch.zeros(6, dtype=torch.uint8), [(0, 2), (2, 4), (4, 6)], incoming, view)()
    if shared_memory_group(view.group) is None:
        choices = parse_choices("ring")
        with ChosenCollectives(view, lambda _, size: choices.algorithm_for(size)) as carrier:
            carrier.start_all_reduce(flat)()
            carrier.start_all_gather(flat, regions, even=False)()
    return _rows(found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_consists_of_messages_is_seen_as_a_whole(ranks: RankPool, backend: str) -> None:
    wanted = [("replicate", "reduce_scatter", 40), ("replicate", "all_gather", 40), ("replicate", "all_to_all", 6)]
    if backend == "gloo":
        wanted += [("replicate", "all_reduce", 40), ("replicate", "all_gather", 40)]
    assert ranks.run(3, _own_collectives, backend=backend) == [wanted] * 3


def _torch_trains(kind: str) -> tuple[list[Row], list[Row]]:
    mesh, found = _mesh(**{"replicate" if kind == "ddp" else "shard": 2})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    wrapped: Callable[[Tensor], Tensor]
    if kind == "ddp":
        wrapped = DistributedDataParallel(model, process_group=mesh["replicate"].group)
    else:
        for layer in model:
            fully_shard(layer, mesh=mesh.device_mesh("shard"))
        wrapped = fully_shard(model, mesh=mesh.device_mesh("shard"))
    before = len(found)
    wrapped(torch.ones(2, 8)).sum().backward()
    return _rows(found[:before]), _rows(found[before:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_torch_starts_is_seen(kind: str, backend: str) -> None:
    with closing(RankPool(2)) as pool:
        found = pool.run(2, _torch_trains, kind, backend=backend)
    weights = 4 * (8 * 16 + 16 + 16 * 8 + 8)
    for _, rows in found:
        if kind == "ddp":
            assert ("replicate", "all_reduce", weights) in rows
            assert {axis for axis, *_ in rows} == {"replicate"}
        else:
            gathered = sum(size for _, what, size in rows if what == "all_gather")
            reduced = sum(size for _, what, size in rows if what == "reduce_scatter")
            assert weights <= gathered <= 2 * weights  # in backward those again that forward let go
            assert reduced == weights


def _dtensor() -> list[Row]:
    mesh, found = _mesh(tensor=2)
    sharded = distribute_tensor(torch.ones(4, 3), mesh.device_mesh("tensor"), [Shard(0)])
    before = len(found)
    sharded.redistribute(placements=[Replicate()]).to_local()
    return _rows(found)[before:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_functional_collectives_of_dtensor_are_seen(backend: str) -> None:
    with closing(RankPool(2)) as pool:
        assert pool.run(2, _dtensor, backend=backend) == [[("tensor", "all_gather", 48)]] * 2


def _overlap(size: int) -> tuple[TraceEvent, TraceEvent]:
    mesh, found = _mesh(replicate=2)
    group = mesh["replicate"].group
    work = dist.all_reduce(torch.ones(size), group=group, async_op=True)
    assert work is not None
    time.sleep(0.3)
    work.wait()
    if mesh["replicate"].index:
        time.sleep(0.2)
    dist.all_reduce(torch.ones(1), group=group)
    return found[0], found[1]


def _told(seen: TraceEvent) -> dict[str, float]:
    return {"total": seen.total_ns / 1e9, "exposed": seen.exposed_ns / 1e9, "exact": seen.is_done_exact}


def _overlap_told(size: int) -> list[dict[str, float]]:
    return [_told(seen) for seen in _overlap(size)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_overlaps_is_told_from_what_is_waited_for(ranks: RankPool, backend: str) -> None:
    (early, waited), (_, prompt) = ranks.run(2, _overlap_told, 1 << 18, backend=backend)
    assert early["exposed"] < 0.1
    if backend == "cpu:weft":  # the engine keeps when each call was done
        assert early["exact"]
        assert early["total"] < 0.25
    assert waited["exposed"] >= 0.15  # for the other rank, which came late
    assert waited["exposed"] > 2 * prompt["exposed"]


def _from_threads() -> list[Row]:
    mesh, found = _mesh(replicate=2)
    works: list[Any] = []
    thread = threading.Thread(
        target=lambda: works.append(dist.all_reduce(torch.ones(2), group=mesh["replicate"].group, async_op=True))
    )
    thread.start()
    thread.join()
    works[0].wait()
    return _rows(found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_of_another_thread_is_seen(ranks: RankPool, backend: str) -> None:
    assert ranks.run(2, _from_threads, backend=backend) == [[("replicate", "all_reduce", 8)]] * 2


def _dropped() -> tuple[int, list[float], int]:
    """A receive that its owner forgets, one after it, and what the group holds before and after a wait."""
    mesh, _ = _mesh(replicate=2)
    view = mesh["replicate"]
    group, other = view.group, view.ranks[1 - view.index]
    assert isinstance(group, WatchedGroup)
    first, second = torch.zeros(2), torch.full((2,), 2.0)
    if view.index:
        work = dist.irecv(first, other, group=group)
        assert work is not None
        hold(group, work.wait)
        del work, first
        gc.collect()
        num_held = len(group.held)
        dist.recv(second.zero_(), other, group=group)
    else:
        num_held = 1
        dist.send(first, other, group=group)
        dist.send(second, other, group=group)
    for wait in list(group.held):
        wait()  # type: ignore[operator]
    return num_held, second.tolist(), len(group.held)


def test_what_is_held_is_not_forgotten_and_takes_its_own_message(ranks: RankPool) -> None:
    assert ranks.run(2, _dropped) == [(1, [2.0, 2.0], 0)] * 2


def _ddp_waits(late_s: float) -> list[dict[str, float]]:
    """Two steps; in the second one rank 1 comes late to backward, for which rank 0 then waits in C++."""
    mesh, found = _mesh(replicate=2)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)),
        process_group=mesh["replicate"].group,
        bucket_cap_mb=0.01,
    )
    model(torch.ones(2, 64)).sum().backward()
    before = len(found)
    loss = model(torch.ones(2, 64)).sum()
    if mesh["replicate"].index:
        time.sleep(late_s)
    loss.backward()
    launched = [seen for seen in found[before:] if seen.operation == "all_reduce"]
    for seen in launched:
        assert 0 < seen.launched_ns <= seen.wait_entered_ns <= seen.wait_exited_ns
        assert seen.done_ns <= seen.wait_exited_ns
    return [_told(seen) for seen in launched]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_ddp_waits_for_in_cpp_is_exposed(backend: str) -> None:
    with closing(RankPool(2)) as pool:
        waiting, prompt = pool.run(2, _ddp_waits, 0.3, backend=backend)
    assert len(waiting) == len(prompt) >= 2
    assert 0.2 <= sum(row["exposed"] for row in waiting) <= max(row["total"] for row in waiting)
    assert sum(row["exposed"] for row in prompt) < 0.1


def _buckets_in_backward() -> list[float]:
    """Launched by a hook in backward and waited for long after it: that wait counts, and nothing in backward."""
    mesh, found = _mesh(replicate=2)
    weight = torch.ones(1 << 16, requires_grad=True)
    works: list[Any] = []

    def launch(gradient: Tensor) -> None:
        works.append(dist.all_reduce(gradient.clone(), group=mesh["replicate"].group, async_op=True))

    weight.register_hook(launch)
    weight.sum().backward()
    (seen,) = found
    waits_before = seen.wait_entered_ns
    works[0].wait()
    assert seen.is_over
    return [waits_before, seen.wait_exited_ns - seen.wait_entered_ns - seen.exposed_ns]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_waited_for_after_backward_is_not_taken_for_ddp(ranks: RankPool, backend: str) -> None:
    assert ranks.run(2, _buckets_in_backward, backend=backend) == [[0, 0]] * 2


def _own_group(backend: str | None) -> list[Row]:
    mesh, found = _mesh(replicate=2)
    group = dist.new_group([0, 1], backend=backend)
    assert group is not None
    dist.all_reduce(torch.ones(3), group=group)
    assert not found
    mesh.watch_also(group, "mine")
    mesh.watch_also(group, "again")
    dist.all_reduce(torch.ones(3), group=group)
    mesh.watch(None)
    dist.all_reduce(torch.ones(3), group=group)
    return _rows(found)


@pytest.mark.parametrize(("backend", "own"), [("gloo", "weft_gloo"), ("cpu:weft", None)])
def test_a_group_of_the_users_own_is_watched_once_it_is_named(ranks: RankPool, backend: str, own: str | None) -> None:
    assert ranks.run(2, _own_group, own, backend=backend) == [[("mine", "all_reduce", 12)]] * 2


def test_a_group_that_cannot_be_watched_is_refused(ranks: RankPool) -> None:
    with pytest.raises(CollectiveError, match=r"'mine' is carried by gloo, .* backend=\"weft_gloo\"\) after the mesh"):
        ranks.run(2, _own_group_unseen)


def _own_group_unseen() -> None:
    mesh, _ = _mesh(replicate=2)
    group = dist.new_group([0, 1])
    assert group is not None
    mesh.watch_also(group, "mine")
