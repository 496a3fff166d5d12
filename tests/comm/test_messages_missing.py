"""A rank that is killed, stopped or late: every survivor names it within the deadline."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankError, RankPool

from weft.comm._execute import PreparedCollective, execute
from weft.comm.mesh import GroupView
from weft.comm.messages import Messenger
from weft.errors import CollectiveError

DEADLINE = 3.0
SLACK = 2.0
"""Of a busy machine."""
PATIENT = 30.0
"""Deadline of collectives in which nobody is missing."""
VICTIM = 2
PHASES = [
    ("ring", 0),
    ("ring", 2),
    ("ring", 4),
    ("halving_doubling", 1),
    ("direct", 1),
    ("tree", 0),
    ("double_tree", 2),
]


def do_some_steps(messenger: Messenger, tensor: torch.Tensor, algorithm: str, steps: int) -> None:
    """Take part in a collective's first steps only."""
    flat = tensor.view(-1)
    prepared, combine = messenger._prepared(flat, "all_reduce", algorithm, {"pieces": 4})
    cut = replace(prepared, steps=prepared.steps[:steps])
    messenger._num_jobs += 1
    execute(
        PreparedCollective(cut, flat, combine, "", (1 << 30) + messenger._num_jobs, PATIENT), messenger._queue.channel
    )


def survive(algorithm: str, steps: int, how: int, folder: str) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    messenger = Messenger(GroupView(tuple(range(n)), rank, dist.group.WORLD), timeout_seconds=PATIENT)
    tensor = torch.ones(4096)
    messenger.run(tensor, "all_reduce", algorithm, pieces=4)
    dist.barrier()
    if rank == VICTIM:
        (Path(folder) / "victim").write_text(str(os.getpid()))
        do_some_steps(messenger, tensor, algorithm, steps)
        os.kill(os.getpid(), how)
        return
    start = time.monotonic()
    try:
        for _ in range(2):  # who was done with the first is caught by the second
            messenger.run(tensor, "all_reduce", algorithm, pieces=4, timeout_seconds=DEADLINE)
    except CollectiveError as error:
        (Path(folder) / f"rank{rank}").write_text(f"{time.monotonic() - start:.3f} {error}")
    messenger.close()
    dist.destroy_process_group()
    if rank == 0:
        others = [Path(folder) / f"rank{other}" for other in range(n) if other != VICTIM]
        stop = time.monotonic() + DEADLINE + SLACK
        while not all(path.exists() for path in others) and time.monotonic() < stop:
            time.sleep(0.02)
        os.kill(int((Path(folder) / "victim").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("algorithm", "steps"), PHASES)
def test_every_survivor_names_the_missing_rank(
    ranks: RankPool, algorithm: str, steps: int, how: signal.Signals, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=f"rank {VICTIM} died with exit code -9"):
        ranks.run(4, survive, algorithm, steps, int(how), str(tmp_path), timeout=60)
    for rank in (0, 1, 3):
        seconds, _, text = (tmp_path / f"rank{rank}").read_text().partition(" ")
        assert re.search(rf"all_reduce of 16,384 bytes by {algorithm} over 4 ranks: rank {VICTIM} ", text), text
        assert re.search(r"in step \d+ of \d+ \([a-z -]+\), waiting for rank", text), text
        assert float(seconds) < 2 * DEADLINE + SLACK
        if how == signal.SIGKILL:
            assert float(seconds) < DEADLINE + SLACK, "a closed connection is seen at once"


def come_late(algorithm: str) -> str:
    rank, n = dist.get_rank(), dist.get_world_size()
    messenger = Messenger(GroupView(tuple(range(n)), rank, dist.group.WORLD), timeout_seconds=PATIENT)
    tensor = torch.ones(1000)
    messenger.run(tensor, "all_reduce", algorithm)
    dist.barrier()
    start = time.monotonic()
    if rank == 1:
        time.sleep(DEADLINE + 0.5)
        start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        messenger.run(tensor, "all_reduce", algorithm, timeout_seconds=DEADLINE)
    assert time.monotonic() - start < DEADLINE + SLACK
    with pytest.raises(CollectiveError, match="was given up before"):
        messenger.run(tensor, "all_reduce", algorithm)
    messenger.close()
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize("algorithm", ["ring", "one_shot", "recursive_doubling"])
def test_a_late_rank_is_named_and_told(ranks: RankPool, algorithm: str) -> None:
    texts = ranks.run(4, come_late, algorithm, timeout=60)
    assert "this rank (1) came too late" in texts[1]
    for rank in (0, 2, 3):
        assert f"rank 1 sent nothing within the deadline of {DEADLINE:g} s" in texts[rank], texts[rank]


def late_within_the_deadline() -> float:
    rank, n = dist.get_rank(), dist.get_world_size()
    with Messenger(GroupView(tuple(range(n)), rank, dist.group.WORLD), timeout_seconds=5.0) as messenger:
        if rank == 1:
            time.sleep(0.7)
        return messenger.run(torch.ones(10), "all_reduce", "ring").sum().item()


def test_a_rank_that_is_late_within_the_deadline_is_waited_for(ranks: RankPool) -> None:
    assert ranks.run(3, late_within_the_deadline) == [30.0] * 3
