"""A rank that fails: the others hear of it from their supervisor at once, and nobody goes on waiting."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from weft.errors import PlanError
from weft.run.launch import RankFailure, RankInfo
from weft.run.launch._failure_notice import (
    FailureListener,
    failure_pipe_path,
    notify,
    notify_other_ranks,
    open_failure_pipes,
)
from weft.run.launch.launcher import RankError, launch_function, launch_script


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("kind", ["kill", "error"])
def test_waits_for_living_ranks_end_too(tmp_path: Path, kind: str, backend: str) -> None:
    how = "was killed by SIGKILL" if kind == "kill" else "stopped with PlanError: only here"
    with pytest.raises((RankError, PlanError), match="rank 1 of 3 .* killed by SIGKILL|rank 1 on host .*: only here"):
        launch_function("launch_jobs:lose_rank_one", {"folder": str(tmp_path), "kind": kind, "backend": backend}, 3)
    for rank in (0, 2):
        seconds, _, text = (tmp_path / f"rank{rank}").read_text().partition(" ")
        assert text.startswith(f"rank 1 {how}, so this one could not go on: "), text
        assert float(seconds) < 1.0


def test_a_stopped_rank_is_named_at_the_deadline() -> None:
    with pytest.raises(RankError, match=r"rank 1 \(pid \d+\) on host .* was stopped by a signal") as caught:
        launch_function("launch_jobs:wait_for_a_stopped_rank", {}, 2)
    assert caught.value.status == 1, "no fault of the input"


SCRIPT = """
import os, sys, time
from weft.run.launch import initialise_distributed

with initialise_distributed("cpu") as distributed:
    if distributed.rank == 1:
        os._exit(9)
    while distributed.rank_failure is None:
        time.sleep(0.01)
    print(distributed.rank_failure, flush=True)
    sys.exit(3)
"""


def test_scripts_hear_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert launch_script(str(tmp_path / "script.py"), [], 2) == 9
    assert "rank 1 ended with exit status 9" in capfd.readouterr().out


def test_a_script_finds_its_pipe_in_the_environment() -> None:
    rank_info = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for more, pipe in (({}, None), ({"WEFT_SUPERVISOR": "word-of-rank-1"}, "word-of-rank-1")):
        read = RankInfo.from_environment({**rank_info, **more})
        assert read is not None
        assert read.failure_pipe == pipe


def _close(listener: FailureListener, words: Iterable[int]) -> None:
    listener.close()
    for word in words:
        os.close(word)


def test_a_listener_hears_the_first_word_and_goes_on_letting_go(tmp_path: Path) -> None:
    words = open_failure_pipes(tmp_path, range(3))
    notify(words.values(), RankFailure(1, "was early"))  # before anybody listens
    heard: list[RankFailure] = []
    twice = threading.Event()

    def on_failure(failure: RankFailure) -> None:
        heard.append(failure)
        if len(heard) > 1:
            twice.set()

    listener = FailureListener(str(failure_pipe_path(tmp_path, 0)), 0, on_failure)
    notify_other_ranks(tmp_path, range(3), RankFailure(2, "was late" * 1000))
    assert listener.failure(20.0) == RankFailure(1, "was early")
    assert twice.wait(20.0)
    _close(listener, words.values())
    assert set(heard) == {RankFailure(1, "was early")}


def test_a_rank_does_not_hear_of_itself(tmp_path: Path) -> None:
    words = open_failure_pipes(tmp_path, range(2))
    listener = FailureListener(str(failure_pipe_path(tmp_path, 0)), 0, lambda failure: None)
    notify_other_ranks(tmp_path, range(2), RankFailure(0, "failed"))
    notify_other_ranks(tmp_path, range(2), RankFailure(1, "failed"))
    assert listener.failure(20.0) == RankFailure(1, "failed")
    _close(listener, words.values())


def test_nobody_listening_is_no_error(tmp_path: Path) -> None:
    notify_other_ranks(tmp_path, range(4), RankFailure(0, "failed"))
