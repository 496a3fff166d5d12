"""`weft train --watch`: a page of the run that begins, as long as it trains."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from trained_runs import SLOW, TrainedRun

_LINK = re.compile(r"^watch     (http://127\.0\.0\.1:\d+)/\?token=(\S+)$", re.MULTILINE)


def _command(run: TrainedRun, *more: str) -> list[str]:
    recipe, plan = run.write()
    return [sys.executable, "-m", "weft.cli", "train", str(recipe), "--plan", str(plan), "--prove", "never", *more]


def _environment() -> dict[str, str]:
    support = [str(Path(__file__).parents[1] / "support"), *sys.path]
    return {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")} | {
        "PYTHONPATH": os.pathsep.join(support)
    }


@pytest.mark.parametrize("is_named", [False, True])
def test_the_page_is_there_while_it_trains(tmp_path: Path, is_named: bool) -> None:
    run = TrainedRun(folder=tmp_path / "one", model=SLOW, pause=0.1, steps=600)
    more = ["--run-folder", str(run.folder)] if is_named else []
    log = tmp_path / "log"
    with log.open("w") as output:
        training = subprocess.Popen(
            _command(run, "--watch", *more), cwd=tmp_path, stdout=output, stderr=output, env=_environment()
        )
    try:
        shown = _shown_steps(log, 3)
        training.send_signal(signal.SIGINT)
        assert training.wait(60) == 130, log.read_text()
    finally:
        training.kill()
        training.wait()
    assert shown >= 3
    (folder,) = [run.folder] if is_named else (tmp_path / "runs").iterdir()
    assert (folder / "metrics.jsonl").is_file()
    assert log.read_text().count("watch     ") == 1


def _shown_steps(log: Path, number: int) -> int:
    """The newest step that the page's own data shows, once it is so many."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (link := _LINK.search(log.read_text())) is not None:
            cookie = f"weft-watch-{link[1].rpartition(':')[2]}={link[2]}"
            asked = urllib.request.Request(f"{link[1]}/view?page=overview", headers={"Cookie": cookie})
            with urllib.request.urlopen(asked, timeout=10) as answer:
                step = _newest_step(json.loads(answer.read()))
            if step >= number:
                return step
        time.sleep(0.2)
    raise AssertionError(log.read_text())


def _newest_step(view: dict[str, object]) -> int:
    found = re.findall(r"step (\d+)", json.dumps(view))
    return max(map(int, found), default=0)


def test_a_refused_run_has_no_page(tmp_path: Path) -> None:
    run = TrainedRun(folder=tmp_path / "one", rate=-1.0)
    done = subprocess.run(_command(run, "--watch"), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "watch  " not in done.stdout + done.stderr


def test_what_this_command_does_not_start_is_refused(tmp_path: Path) -> None:
    words = _command(
        TrainedRun(folder=tmp_path / "one"), "--watch", "--nodes", "2", "--run-folder", str(tmp_path / "r")
    )
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "weft watch RUN" in done.stderr
