"""A rank that is slower than its peers is named, with the phase; ranks of a healthy run are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from shrink_kit import recipe_of, train, write_corpus

import weft
from weft.events import RunFolder
from weft.events.progress import KEPT_STEPS, ProgressBoard
from weft.run.launch._straggler import StragglerWatch
from weft.run.launch.launcher import ForkServer


def test_a_slow_rank_of_a_training_is_named(
    fork_server: ForkServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    fault = {"fault": "straggle", "rank": 1, "step": 10}
    recipe = recipe_of(corpus, tmp_path, fault=fault, steps=110, save_every=None)
    train(recipe, tmp_path, fork_server, weft.Plan.ddp(replicate=2))
    log = RunFolder(tmp_path / "run").launcher_log.read_text()
    assert log.count("is a straggler") == 1
    assert "rank 1 of 2" in log
    assert "most of it in forward_backward" in log


class Job:
    """Ranks that write their times, and a launcher that looks."""

    def __init__(self, path: Path, num_ranks: int, peers: tuple[tuple[int, ...], ...]) -> None:
        self.board = ProgressBoard.create(path, num_ranks)
        self.rows = [self.board.row(rank) for rank in range(num_ranks)]
        self.told: list[str] = []
        self.watch = StragglerWatch(self.board, peers, self.told.append, clock=lambda: self.step / 2)
        self.step = 0
        for row in self.rows:
            row.begin(0)

    def do(self, *own_seconds: float, data: tuple[float, ...] = ()) -> None:
        self.step += 1
        for rank, (row, seconds) in enumerate(zip(self.rows, own_seconds, strict=True)):
            row.took(self.step, int(seconds * 1e9), int((data[rank] if data else 0.0) * 1e9), 0)
            row.finished(self.step)
        self.watch.poll()


def test_a_rank_is_found_within_twenty_steps_and_told_once(tmp_path: Path) -> None:
    job = Job(tmp_path / "board", 4, ((0, 1, 2, 3),))
    for _ in range(30):
        job.do(0.10, 0.11, 0.09, 0.10)
    assert not job.told
    for _ in range(20):
        job.do(0.10, 0.11, 0.16, 0.10)
    assert job.told
    for _ in range(40):
        job.do(0.10, 0.11, 0.16, 0.10)
    (text,) = job.told
    assert text.startswith("rank 2 of 4")
    assert "1.6 times that of its peers (100 ms)" in text


def test_the_phase_is_where_the_rank_loses_time(tmp_path: Path) -> None:
    job = Job(tmp_path / "board", 2, ((0, 1),))
    for _ in range(30):
        job.do(0.1, 0.3, data=(0.01, 0.2))
    assert "most of it in data_wait" in job.told[0]


@pytest.mark.parametrize(
    "case", ["single steps", "all slow", "other stages", "below a millisecond", "a little", "for a moment"]
)
def test_what_is_no_straggler(tmp_path: Path, case: str) -> None:
    peers = ((0, 1), (2,)) if case == "other stages" else ((0, 1, 2),)
    job = Job(tmp_path / "board", 3, peers)
    for step in range(60):
        slow = {
            "single steps": 5.0 if step % 3 == 0 else 1.0,
            "other stages": 3.0,
            "a little": 1.4,
            "for a moment": 9.0 if 30 <= step < 44 else 1.0,
        }.get(case, 1.0)
        if case == "below a millisecond":
            job.do(1e-4, 1e-4, 9e-4)
        else:
            factor = 4.0 if case == "all slow" and step > 30 else 1.0
            job.do(0.01 * factor, 0.011 * factor, 0.01 * factor * slow)
    assert not job.told


def test_steps_that_are_written_over_are_not_compared(tmp_path: Path) -> None:
    job = Job(tmp_path / "board", 2, ((0, 1),))
    for _ in range(30):
        job.do(0.01, 0.01)
    for step in range(31, 31 + KEPT_STEPS):  # a rank that is far ahead, which no collective allows
        job.rows[1].took(step, int(9e9), 0, 0)
        job.rows[1].finished(step)
        job.watch.poll()
    assert not job.told
