"""When a step that makes no progress is suspected: by the board that ranks write, without ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from weft.events.progress import ProgressBoard, ProgressRow
from weft.run.launch._hang import HangLimits, HangWatch
from weft.run.launch._job import RankExit
from weft.run.launch._rank_info import stacks_path
from weft.run.launch._report import missing_rank

LIMIT_SECONDS = 0.15


class Watched:
    """A watch of one rank, and how often it asked for stacks."""

    def __init__(self, folder: Path) -> None:
        board = ProgressBoard.create(folder / "progress", 1)
        self.row: ProgressRow = board.row(0)
        self.asked = 0
        self._watch = HangWatch(board, folder, HangLimits(LIMIT_SECONDS, 600.0), self._ask)

    def _ask(self) -> None:
        self.asked += 1

    def wait(self, seconds: float = 3 * LIMIT_SECONDS) -> int:
        """Look for a while; return how often stacks were asked for."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self._watch.poll() is None
            time.sleep(LIMIT_SECONDS / 10)
        return self.asked


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_step_without_progress_is_suspected(watched: Watched) -> None:
    watched.row.begin(0)
    watched.wait(0.05)
    watched.row.finished(1)
    assert watched.wait() >= 1


def test_neither_before_the_loop_nor_in_its_first_step_nor_behind_it(watched: Watched) -> None:
    assert watched.wait() == 0
    watched.row.begin(100)  # resumed: no step of this process is done
    assert watched.wait() == 0
    watched.row.finished(101)
    watched.wait(0.05)
    watched.row.end()
    assert watched.wait() == 0


@pytest.mark.parametrize("phase", [0, 4, 5, 6])
def test_input_saves_evaluation_and_printing_are_no_step(watched: Watched, phase: int) -> None:
    watched.row.begin(0)
    watched.wait(0.05)
    watched.row.finished(1)
    before = watched.row.enter(phase)
    assert watched.wait() == 0
    watched.row.leave(before)
    assert watched.wait() >= 1


def test_who_is_behind_says_how_long_it_may_take(tmp_path: Path) -> None:
    """A rank that has finished the step waits in its save for one that hangs in the optimizer."""
    asked: list[int] = []
    board = ProgressBoard.create(tmp_path / "progress", 2)
    watch = HangWatch(board, tmp_path, HangLimits(LIMIT_SECONDS, 600.0), lambda: asked.append(1))
    rows = [board.row(0), board.row(1)]
    for row in rows:
        row.begin(0)
    watch.poll()
    for row in rows:
        row.finished(1)
    watch.poll()
    rows[0].finished(2)
    rows[0].enter(4)
    rows[1].enter(3)
    until = time.monotonic() + 3 * LIMIT_SECONDS
    while time.monotonic() < until:
        assert watch.poll() is None
        time.sleep(0.01)
    assert asked


ELSEWHERE = (
    'Thread 0x1 (most recent call first):\n  File "/model.py", line 7 in fetch\n  File "/loop.py", line 1 in run\n'
)
WAITS = 'Thread 0x1 (most recent call first):\n  File "/x/torch/distributed/c10d.py", line 7 in all_reduce\n'


@pytest.mark.parametrize(
    ("stacks", "missing"),
    [
        ((WAITS, WAITS, ELSEWHERE), 2),
        ((WAITS, ELSEWHERE, WAITS), 1),
        ((WAITS, WAITS, WAITS), None),
        (("", "", ""), None),
    ],
)
def test_where_collectives_time_out_first_the_rank_is_named_that_is_in_none(
    tmp_path: Path, stacks: tuple[str, ...], missing: int | None
) -> None:
    def write() -> None:
        for rank, text in enumerate(stacks):
            stacks_path(tmp_path, rank).write_text(text)

    board = ProgressBoard.create(tmp_path / "progress", 3)
    watch = HangWatch(board, tmp_path, HangLimits(None, 600.0), write)
    for rank in range(3):
        board.row(rank)
    watch.blame()
    assert watch.missing_rank([1, 2]) is None  # nobody has been looked at
    until = time.monotonic() + 10
    while watch.needs_time([1, 2]) and time.monotonic() < until:
        time.sleep(0.02)
    found = watch.missing_rank([1, 2])
    assert (found.rank if found is not None else None) == missing
    if found is not None:
        assert "the other ranks have waited for it in vain, while it was before its first step" in found.message
        assert found.trace == ["  /loop.py, line 1, in run", "  /model.py, line 7, in fetch"]


def test_the_rank_is_named_that_all_have_waited_for() -> None:
    def waited(rank: int, missing: str) -> RankExit:
        text = f"A barrier timed out: it was not finished in 6 s: {missing} has not come. It may be stopped."
        return RankExit(rank=rank, host="a", when=0.0, error="CollectiveError", message=text)

    told = RankExit(rank=2, host="a", when=0.0, error="CollectiveError", message="rank 0 failed, so this one could not")
    assert missing_rank(waited(0, "rank 1"), {1: waited(1, "rank 2"), 2: told}) == 2
    assert missing_rank(waited(0, "rank 1"), {1: None}) == 1
    assert missing_rank(waited(0, "rank 1"), {1: waited(1, "rank 0")}) is None  # they wait for one another
    assert missing_rank(told, {}) is None
