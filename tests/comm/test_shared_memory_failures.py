"""A rank that dies, stops, leaves or calls something else: every survivor gets the named error, soon."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankError, RankPool
from shared_memory_jobs import group, traces
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.comm.shared_memory import shared_memory_group
from weft.config.plan import MeshPlan
from weft.errors import CollectiveError

WEFT = "cpu:weft"
REBUILT_SECONDS = 1.0
"""From a rank's death to the first sum over those that are left."""
CALLS: tuple[Callable[[], Any], ...] = (
    lambda: dist.all_reduce(torch.ones(10)),
    lambda: dist.all_reduce(torch.ones(3_000_000)),
    lambda: dist.all_reduce(torch.ones(10), async_op=True).wait(),
    lambda: dist.broadcast(torch.ones(1_000_000), 0),
    lambda: dist.barrier(),
    lambda: group().reduce_scatter_regions([torch.ones(9)] * dist.get_world_size(), torch.ones(9)).wait(),
)


def _write(folder: str, line: str) -> None:
    (Path(folder) / f"rank{dist.get_rank()}").write_text(line)


def _killed(folder: str, call: int) -> None:
    CALLS[call]()
    when = Path(folder) / "when"
    if dist.get_rank() == 1:
        when.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        CALLS[call]()
    except CollectiveError as error:
        _write(folder, f"{time.time() - float(when.read_text())} {error}")
        raise


@pytest.mark.parametrize("call", range(len(CALLS)))
def test_a_killed_rank_is_named_within_a_second(ranks: RankPool, tmp_path: Path, call: int) -> None:
    with pytest.raises(RankError, match="rank 1 died"):
        ranks.run(3, _killed, str(tmp_path), call, backend=WEFT)
    for rank in (0, 2):
        seconds, _, text = (tmp_path / f"rank{rank}").read_text().partition(" ")
        assert "the process of rank 1 has died" in text
        assert "with another in its place" in text
        assert float(seconds) <= 1.0


@dataclass(frozen=True, slots=True)
class _Rebuilding:
    """A rank dies while the others wait for it; some of them form a new group in the same processes."""

    folder: str
    victim: int
    survivors: tuple[int, ...]
    """Those of the new group, by their old ranks."""

    def lose_the_victim(self) -> None:
        dist.all_reduce(torch.ones(10))
        if dist.get_rank() == self.victim:
            time.sleep(0.1)  # until the others wait
            (Path(self.folder) / "when").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CollectiveError, match=f"rank {self.victim} has died"):
            dist.all_reduce(torch.ones(10))

    def start_again(self) -> None:
        """Meet at a store of their own, as under a supervisor, with new ranks."""
        rank, world = self.survivors.index(dist.get_rank()), len(self.survivors)
        dist.destroy_process_group()
        gc.collect()
        store = dist.FileStore(f"{self.folder}/again", world)
        dist.init_process_group(WEFT, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))

    def tell(self, values: Sequence[Tensor]) -> None:
        """Seconds since the kill, what has been summed, and how many groups' memory is there."""
        seconds = time.time() - float((Path(self.folder) / "when").read_text())
        told = {"seconds": seconds, "values": [value[0].item() for value in values], **traces()}
        (Path(self.folder) / f"new{dist.get_rank()}").write_text(json.dumps(told))
        dist.barrier()


def _rebuilt(job: _Rebuilding) -> None:
    job.lose_the_victim()
    job.start_again()
    value = torch.full((1_000,), float(job.survivors[dist.get_rank()]))
    dist.all_reduce(value)
    job.tell([value])


def _heard(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"new{rank}").read_text())


@pytest.mark.parametrize("victim", range(3))
def test_a_second_after_a_kill_a_new_group_works(ranks: RankPool, tmp_path: Path, victim: int) -> None:
    """All that the gate allows, from the kill to the new group's first sum, on whatever a busy machine leaves."""
    survivors = tuple(rank for rank in range(3) if rank != victim)
    with pytest.raises(RankError, match=f"rank {victim} died"):
        ranks.run(3, _rebuilt, _Rebuilding(str(tmp_path), victim, survivors), backend=WEFT)
    for rank in range(2):
        told = _heard(tmp_path, rank)
        assert told["values"] == [sum(survivors)]
        assert told["seconds"] <= REBUILT_SECONDS
        assert told["mappings"] == 1, "the dead group's memory is still there"


def _rebuilt_mesh(job: _Rebuilding) -> None:
    """Three replicas of two tensor ranks each; one loses a rank, the others go on as a mesh of two."""
    before = Mesh(MeshPlan(replicate=3, tensor=2), torch.device("cpu"))
    dist.all_reduce(torch.ones(10), group=before["tensor"].group)
    job.lose_the_victim()
    del before
    if dist.get_rank() not in job.survivors:  # half a replica
        dist.destroy_process_group()
        return
    job.start_again()
    mesh = Mesh(MeshPlan(replicate=2, tensor=2), torch.device("cpu"))
    values = [torch.full((1_000,), 10.0**mesh.rank) for _ in ("tensor", "replicate", "world")]
    for value, axis in zip(values, ("tensor", "replicate", "world"), strict=True):
        dist.all_reduce(value, group=mesh[axis].group)  # type: ignore[index]  # names of groups
    job.tell(values)


def test_a_second_after_a_kill_a_new_mesh_works(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 died"):
        ranks.run(6, _rebuilt_mesh, _Rebuilding(str(tmp_path), 0, (2, 3, 4, 5)), backend=WEFT)
    for rank, pair, replicas in ((0, 11, 101), (1, 11, 1010), (2, 1100, 101), (3, 1100, 1010)):
        told = _heard(tmp_path, rank)
        assert told["values"] == [pair, replicas, 1111]
        assert told["seconds"] <= REBUILT_SECONDS


def _stopped(folder: str) -> None:
    if dist.get_rank() == 1:
        waker = subprocess.Popen(["sh", "-c", f"sleep 1.2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
        return
    start = time.monotonic()
    short = shared_memory_group(dist.group.WORLD)
    assert short is not None
    short.set_timeout(timedelta(seconds=0.5))
    try:
        dist.all_reduce(torch.ones(10))
    except CollectiveError as error:
        _write(folder, f"{time.monotonic() - start} {error}")
    dist.destroy_process_group()


def test_a_stopped_rank_is_named_at_the_deadline(ranks: RankPool, tmp_path: Path) -> None:
    with contextlib.suppress(CollectiveError, RankError):  # rank 1 finds its group ended
        ranks.run(3, _stopped, str(tmp_path), backend=WEFT, timeout=10)
    waited: list[float] = []
    for rank in (0, 2):
        seconds, _, text = (tmp_path / f"rank{rank}").read_text().partition(" ")
        assert "was not finished in 0.5 s: rank 1 has not come" in text
        waited.append(float(seconds))
    assert 0.5 <= max(waited) < 1.1  # who began later is told by the first


def _different(kind: str) -> str:
    value = torch.ones(10)
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(value)
        elif kind == "size":
            dist.all_reduce(torch.ones(11))
        elif kind == "operation":
            dist.all_reduce(value, dist.ReduceOp.MAX)
        elif kind == "call":
            dist.broadcast(value, 0)
        else:
            dist.all_reduce(torch.ones(2_000_000))
    except CollectiveError as error:
        with pytest.raises(CollectiveError, match="does not fit"):
            dist.barrier()
        dist.destroy_process_group()
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("kind", ["size", "operation", "call", "large"])
def test_different_calls_are_an_error_on_every_rank(ranks: RankPool, kind: str) -> None:
    for rank, text in enumerate(ranks.run(2, _different, kind, backend=WEFT)):
        assert "does not fit what rank" in text
        assert "All ranks of a group must make the same calls" in text
        assert ("all-reduce" in text) or rank == 1


def _left() -> str:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    return str(caught.value)


def test_a_rank_that_leaves_is_named(ranks: RankPool) -> None:
    text, nothing, other = ranks.run(3, _left, backend=WEFT)
    assert nothing == ""
    for said in (text, other):
        assert "rank 1 has left the group" in said


def _aborted() -> tuple[str, float]:
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        group().abort()
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    return str(caught.value), time.monotonic() - start


def test_aborting_releases_everybody(ranks: RankPool) -> None:
    for text, seconds in ranks.run(3, _aborted, backend=WEFT):
        assert "rank 1 aborted the group" in text
        assert seconds < 1.3


def _left_in_the_middle() -> tuple[str, str]:
    """A rank destroys the group while an operation of its own is under way."""
    work = None
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        time.sleep(0.1)
    else:
        time.sleep(0.4)
    own = group()
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        assert work is not None
        with pytest.raises(CollectiveError) as caught:
            work.wait()
        return "", str(caught.value)
    with pytest.raises(CollectiveError) as caught:
        dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    del own
    return str(caught.value), ""


def test_leaving_in_the_middle_releases_the_others(ranks: RankPool) -> None:
    (_, left), (told, _) = ranks.run(2, _left_in_the_middle, backend=WEFT)
    assert "this rank has left the group" in left
    assert "rank 0 has left the group" in told


def _future_of_a_failure() -> str:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
    with pytest.raises(CollectiveError, match="rank 1 has left") as caught:
        future.wait()
    dist.destroy_process_group()
    return str(caught.value)


def test_a_future_carries_the_error(ranks: RankPool) -> None:
    assert "cannot be finished" in ranks.run(2, _future_of_a_failure, backend=WEFT)[0]
