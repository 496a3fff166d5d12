"""What a careful reader of the shared-memory groups feared: collectors, forks, other devices, ends in odd places."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pool import RankPool
from shared_memory_jobs import group

from weft.comm.shared_memory._arena import Arena
from weft.errors import CollectiveError

WEFT = "cpu:weft"


def test_a_collector_may_give_back_in_the_middle_of_taking() -> None:
    """Its thread holds the lock then: giving back must not ask for it."""
    arena = Arena(1 << 20)
    first, second = arena.take(5000), arena.take(5000)
    assert (first, second) == (0, 8192)
    assert arena._lock.acquire(timeout=1)
    try:
        arena.give_back(0)
    finally:
        arena._lock.release()
    assert arena.taken_bytes == 8192
    assert arena.take(8192) == 0


def _elsewhere() -> list[str]:
    said: list[str] = []
    for call in (
        lambda: dist.all_reduce(torch.ones(4, device="meta")),
        lambda: dist.broadcast(torch.ones(4, device="meta"), 0),
        lambda: dist.all_gather_into_tensor(torch.ones(8, device="meta"), torch.ones(4, device="meta")),
    ):
        try:
            group().allreduce([torch.ones(4, device="meta")], dist.AllreduceOptions())
            call()
        except CollectiveError as error:
            said.append(str(error))
    dist.barrier()
    return said


def test_tensors_of_other_devices_are_refused(ranks: RankPool) -> None:
    for said in ranks.run(2, _elsewhere, backend=WEFT):
        assert len(said) == 3
        assert all("a tensor on meta cannot be sent over shared memory" in text for text in said)


def _alone() -> list[str]:
    """Over one rank nobody compares sizes with another's."""
    said: list[str] = []
    for output, given, splits in (
        (torch.empty(2), torch.ones(4), None),
        (torch.empty(4, dtype=torch.float64), torch.ones(4), None),
        (torch.empty(4), torch.ones(4), [-4]),
    ):
        try:
            group().alltoall_base(output, given, splits, splits)
        except CollectiveError as error:
            said.append(str(error))
    return said


def test_an_exchange_with_oneself_is_checked(ranks: RankPool) -> None:
    (said,) = ranks.run(1, _alone, backend=WEFT)
    assert ["8" in text or "cannot" in text for text in said] == [True] * 3


def _forked() -> tuple[int, float]:
    tensor = group().allocate(1000)
    tensor.fill_(1.0)
    dist.all_reduce(tensor)
    child = os.fork()
    if child == 0:
        # What a data loader's worker does with a group that it has inherited: nothing, and then forget it.
        try:
            group().engine.abort()
            group().engine.close()
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    dist.all_reduce(tensor)
    return status, float(tensor.sum())


def test_a_forked_child_harms_nobody(ranks: RankPool) -> None:
    assert ranks.run(2, _forked, backend=WEFT) == [(0, 4000.0)] * 2


def _late() -> tuple[float, str]:
    other = dist.new_group(timeout=timedelta(seconds=0.5))
    began, error = time.monotonic(), ""
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(10), group=other, async_op=True).wait()
        except CollectiveError as problem:
            error = str(problem)
    else:
        time.sleep(2.0)
    return time.monotonic() - began, error


def test_an_asynchronous_call_names_who_is_late(ranks: RankPool) -> None:
    seconds, error = ranks.run(2, _late, backend=WEFT)[0]
    assert "rank 1 has not come" in error
    assert seconds < 1.9


def _impatient() -> bool:
    """A short wait for a late call does not shorten an earlier one's patience."""
    if dist.get_rank() == 1:
        time.sleep(0.6)
    first = dist.all_reduce(torch.ones(10), async_op=True)
    second = dist.all_reduce(torch.ones(10), async_op=True)
    if dist.get_rank() == 0:
        second.wait(timedelta(seconds=0.3))  # within the grace of a second
    first.wait()
    second.wait()
    return True


def test_a_short_wait_is_not_everybodys(ranks: RankPool) -> None:
    assert ranks.run(2, _impatient, backend=WEFT) == [True] * 2


def _closed_under_a_waiter() -> str:
    said: list[str] = []
    other = dist.new_group()

    def wait() -> None:
        try:
            dist.all_reduce(torch.ones(10), group=other, async_op=True).wait()
        except CollectiveError as error:
            said.append(str(error))

    if dist.get_rank() == 0:
        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.3)
        other.shutdown()
        waiter.join(timeout=10)
        assert not waiter.is_alive()
    else:
        time.sleep(1.0)
    return "".join(said)


def test_who_waits_while_the_group_ends_is_told(ranks: RankPool) -> None:
    assert "cannot be" in ranks.run(2, _closed_under_a_waiter, backend=WEFT)[0]


_EXIT = """
import os, sys, time, torch, torch.distributed as dist
from weft.comm.shared_memory import register_shared_memory_backend
rank = int(sys.argv[1])
register_shared_memory_backend()
dist.init_process_group("cpu:weft", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
if rank == 0:
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    time.sleep(0.2)
    raise SystemExit(7)
time.sleep(1.5)
os._exit(0)
"""


def test_a_program_may_end_in_the_middle_of_a_call(tmp_path: Path) -> None:
    """With its own status, and not by a signal: the thread ends before the memory goes."""
    command = [sys.executable, "-c", _EXIT]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE) for rank in (0, 1)
    ]
    try:
        assert started[0].wait(timeout=60) == 7
        assert started[1].wait(timeout=60) == 0
    finally:
        for process in started:
            process.kill()
            process.communicate()
