"""When a step that makes no progress is suspected: by the board that ranks write, without ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from weft.events.progress import ProgressBoard, ProgressRow
from weft.run.launch._hang import HangLimits, HangWatch

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
