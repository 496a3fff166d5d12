"""A real run of four ranks that goes on while a test looks at it.  Any rank can be made slow in it, or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from weft.errors import LaunchError
from weft.watch.store import TelemetryReader

T = TypeVar("T")
WEFT = str(Path(sys.executable).with_name("weft"))
SCRIPT = str(Path(__file__).parents[1] / "watch" / "slow_script.py")


class LivingRun:
    """A session on four ranks, started by `weft launch`."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self._folder = folder
        self._process = process
        self.reader = self.wait_for(self._first_step, 180)
        """Reads its telemetry, in which a step is by now."""
        self.folder = self.reader.paths[0].parent

    def slow(self, rank: int, phase: str, seconds: float) -> None:
        """Let a rank sleep so long in a phase of each step from now on, and no other rank any more."""
        _write_slow(self._folder, rank, phase, seconds)

    @contextmanager
    def stopped(self, rank: int) -> Generator[None]:
        """Stop a rank's process."""
        pid = self.wait_for(lambda: self.reader.live().get(rank, {}).get("pid"), 10)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def wait_for(self, look: Callable[[], T | None], seconds: float) -> T:
        """Look until there is something, or the run has ended, or the time is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = look()
            if found is not None:
                return found
            assert self._process.poll() is None, self._process.communicate()[0]
            time.sleep(0.1)
        raise AssertionError(f"not seen in {seconds} s")

    def _first_step(self) -> TelemetryReader | None:
        for run in self._folder.glob("runs/*"):
            try:
                reader = TelemetryReader(run)
            except LaunchError:
                return None
            if reader.newest_step()[1] > 0:
                return reader
            reader.close()
        return None


@contextmanager
def living_run(folder: Path, rank: int = 0, phase: str = "forward", seconds: float = 0.0) -> Generator[LivingRun]:
    """Start a run that a test outlasts, in which a rank sleeps in a phase of each step, and end it."""
    _write_slow(folder, rank, phase, seconds)
    words = [SCRIPT, "0", "forward", "0", "100000", str(folder / "slow")]
    process = subprocess.Popen(
        [WEFT, "launch", "-n", "4", "--on-failure", "hang_seconds=60", *words],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        run = LivingRun(folder, process)
        with closing(run.reader):
            yield run
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _write_slow(folder: Path, rank: int, phase: str, seconds: float) -> None:
    new = folder / "slow.new"
    new.write_text(f"{rank} {phase} {seconds}")
    new.replace(folder / "slow")
