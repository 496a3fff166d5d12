"""`weft watch --terminal` shows every page as text, at any width, and follows keys."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from recorded_runs import MadeUpRun
from rich.cells import cell_len
from rich.console import Console

from weft.cli import build_app
from weft.errors import LaunchError
from weft.watch.run_record import RunRecord
from weft.watch.terminal import TerminalView, render_page
from weft.watch.views import PAGES, page_of


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    made = MadeUpRun(folder=tmp_path / "run", data=2, pipeline=2, slow={(2, "forward"): 0.03})
    made.add(60)
    made.event("generation", number=2, failure="killed", rank=1, host="host-0", world_size=4, restored_step=3)
    return made


def printed(record: RunRecord, page: str, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, height=40, force_terminal=False)
    console.print(render_page(page_of(record, page), width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [48, 100, 220])
def test_every_page_fits_and_says_what_its_blocks_say(run: MadeUpRun, width: int) -> None:
    record = RunRecord(run.folder)
    for page in PAGES:
        text = printed(record, page, width)
        assert max(cell_len(line) for line in text.split("\n")) <= width, page
        flat = " ".join(text.replace("│", " ").split())
        for block in page_of(record, page)["blocks"]:
            if block["kind"] not in ("controls", "banner"):
                assert " ".join(block["says"].split()) in flat, (page, block["title"])


def test_the_first_page_names_the_slow_rank(run: MadeUpRun) -> None:
    text = printed(RunRecord(run.folder), "overview", 120)
    assert "Rank 2 on host host-1 holds the step back" in text
    assert "→ Look at what else runs on this host" in text
    assert "█" in text


def test_the_plan_stands_beside_what_was_measured(run: MadeUpRun) -> None:
    record = RunRecord(run.folder)
    assert "ms, plan 10" in printed(record, "plan", 120)
    lanes = [line for line in printed(record, "pipeline", 120).split("\n") if "stage 1" in line]
    for lane in lanes:  # forwards of the four microbatches, and then their backwards
        assert "".join(sorted(set(lane.partition("stage 1")[2]) & set("0123"))) == "0123"
    assert lanes[0].lstrip().startswith("plan")


def test_a_folder_without_telemetry_has_pages_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 2.0, "step_seconds": 0.1}\n')
    record = RunRecord(tmp_path)
    for page in PAGES:
        printed(record, page, 80)


def test_keys_change_page_run_and_line(run: MadeUpRun) -> None:
    console = Console(file=io.StringIO(), width=100, height=20, force_terminal=True)
    record = RunRecord(run.folder)
    view = TerminalView([record, record], console)
    view.screen()
    assert view.press("right")
    assert view.page == 1
    assert view.press("0")
    assert view.page == 9
    assert view.press("right")
    assert view.page == 0
    assert view.press("left")
    assert view.page == 9
    view.press("1")
    view.press("page down")
    assert view.first_line == 17
    view.press("up")
    assert view.first_line == 16
    view.press("run")
    assert view.run_shown == 1
    for _ in range(50):
        view.press("page down")
    view.screen()
    lines = len(printed(record, "overview", 100).split("\n"))
    assert view.first_line < lines  # no further than the end
    assert view.press("")
    assert not view.press("quit")
    drawn = console.render_lines(view.screen(), pad=False)
    assert len(drawn) == 20


def test_a_terminal_is_drawn_and_given_back(run: MadeUpRun) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    before = termios.tcgetattr(slave)
    environment = {**os.environ, "TERM": "xterm"}
    command = [sys.executable, "-m", "weft.cli", "watch", str(run.folder), "--terminal"]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        try:
            _read_until(master, "What holds it back")
            os.write(master, b"2")
            _read_until(master, "Ranks over steps")
            os.write(master, b"q")
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert termios.tcgetattr(slave)[3] == before[3]
    for descriptor in (master, slave):
        os.close(descriptor)


def _read_until(descriptor: int, text: str, seconds: float = 20.0) -> None:
    found, end = "", time.monotonic() + seconds
    while text not in found:
        assert time.monotonic() < end, found[-2000:]
        if select.select([descriptor], [], [], 0.2)[0]:
            found += os.read(descriptor, 65536).decode(errors="replace")


def test_without_a_terminal_one_page_is_printed(run: MadeUpRun, capsys: pytest.CaptureFixture[str]) -> None:
    app = build_app()
    app(["watch", str(run.folder), "--terminal"], exit_on_error=False, result_action="return_value")
    assert "What holds it back" in capsys.readouterr().out
    with pytest.raises(LaunchError, match="starts no server"):
        app(
            ["watch", str(run.folder), "--terminal", "--port", "8080"],
            exit_on_error=False,
            result_action="return_value",
        )
