"""The rank that serves the store in which ranks report is the one that is missing: nobody else is blamed for it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankError, RankPool

from weft.comm._failure_table import FailureReport, FailureTable
from weft.comm.mesh import GroupView
from weft.comm.messages import Messenger
from weft.errors import CollectiveError

DEADLINE = 2.0
SLACK = 2.0
"""Of a busy machine."""


def served_by_the_first(path: Path) -> dist.TCPStore:
    """As with `env://`: the first rank's process serves the store."""
    first = dist.get_rank() == 0
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=60)) if first else None
    if store is not None:
        path.write_text(str(store.port))
    dist.barrier()
    return store or dist.TCPStore("127.0.0.1", int(path.read_text()), timeout=timedelta(seconds=60))


def lose_the_host(how: int, folder: str) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    store = served_by_the_first(Path(folder) / "port")
    before = threading.active_count()
    messenger = Messenger(GroupView(tuple(range(n)), rank, dist.group.WORLD), timeout_seconds=DEADLINE, store=store)
    tensor = torch.ones(1000)
    messenger.run(tensor, "all_reduce", "ring", timeout_seconds=30.0)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), how)
        return
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        messenger.run(tensor, "all_reduce", "ring")
    (Path(folder) / f"rank{rank}").write_text(f"{time.monotonic() - start:.3f} {caught.value}")
    messenger.close()
    dist.destroy_process_group()
    others = [Path(folder) / f"rank{other}" for other in range(1, n)]
    stop = time.monotonic() + DEADLINE + SLACK
    while not all(path.exists() for path in others) and time.monotonic() < stop:
        time.sleep(0.02)
    if rank == 1 and how == signal.SIGSTOP:
        os.kill(int((Path(folder) / "host").read_text()), signal.SIGKILL)
    while threading.active_count() > before and time.monotonic() < stop + SLACK:
        time.sleep(0.02)
    (Path(folder) / f"threads{rank}").write_text(str(threading.active_count() - before))


def begin(how: int, folder: str) -> None:
    if dist.get_rank() == 0:
        (Path(folder) / "host").write_text(str(os.getpid()))
    lose_the_host(how, folder)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_host_of_the_store_is_named(ranks: RankPool, how: signal.Signals, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 died with exit code -9"):
        ranks.run(4, begin, int(how), str(tmp_path), timeout=60)
    state = "is gone" if how == signal.SIGKILL else "does not answer"
    for rank in (1, 2, 3):
        seconds, _, text = (tmp_path / f"rank{rank}").read_text().partition(" ")
        assert float(seconds) < DEADLINE + SLACK
        assert re.search(rf"over 4 ranks: (rank 0 .*, and )?the group's store {state}", text), text
        assert ("rank 0, unless a launcher serves it" if rank == 2 else "rank 0") in text, text
        assert (tmp_path / f"threads{rank}").read_text() == "0"


def test_what_was_reported_before_the_store_went_counts() -> None:
    """The store's host says for whom it waited and ends; who reads that later must not think that it was the cause."""
    host = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=5))
    table = FailureTable(dist.TCPStore("127.0.0.1", host.port, timeout=timedelta(seconds=5)), "board", 3)
    FailureTable(host, "board", 3).leave(0, FailureReport((2,), "closed"))
    assert table.has_alarm()
    assert table.reports() == {0: FailureReport((2,), "closed")}
    del host
    assert table.missing(1, FailureReport((0,), "closed"), 5.0) == (
        (2,),
        {0: FailureReport((2,), "closed"), 1: FailureReport((0,), "closed")},
    )
    assert table.state == "gone"
    assert not table.has_alarm()
