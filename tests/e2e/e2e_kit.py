"""Runs Weft as a user does: processes in a folder of their own, watched line by line, with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WEFT = str(Path(sys.executable).with_name("weft"))
PATIENCE_SECONDS = 120.0
GRACE_SECONDS = 5.0
_MARK = "WEFT_TEST_MARK"

RECIPE = """
[model]
reference = "decoder"
num_layers = 4
hidden_size = 32
num_heads = 4
num_kv_heads = 2
vocabulary_size = 300
sequence_length = 32

[data]
train = [{ source = "corpus" }]
validation_fraction = 0.3
cache = "cache"

[batch]
global_batch_size = 8

[optimizer]
learning_rate = 1e-2

[run]
steps = 60
evaluate_every = 40
save_every = 40
"""


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    """Exit status; negative: the signal that killed it."""
    lines: list[str]
    """What it printed, stderr included."""
    seconds_after: float
    """From the act (see `watch`) to the end."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def write_corpus(folder: Path) -> None:
    """Twelve small texts, so that both splits have documents."""
    (folder / "corpus").mkdir()
    for number in range(12):
        words = (f"text {number} says {line * number % 97} and {line} again\n" for line in range(120))
        (folder / "corpus" / f"{number}.txt").write_text("".join(words))


def watch(
    command: Sequence[str], folder: Path, *, until: str | None = None, act: Callable[[Act], None] | None = None
) -> Done:
    """Run a command to its end; when a line begins with `until`, do `act` once.  Fails when a process outlives it."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, _MARK: mark, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    acted = started = time.monotonic()
    try:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            assert time.monotonic() - started < PATIENCE_SECONDS, "\n".join(lines)
            if act is not None and until is not None and line.startswith(until):
                act(Act(process.pid, mark))
                act, acted = None, time.monotonic()
        status = process.wait(PATIENCE_SECONDS)
        orphans = _settled(mark)
        assert not orphans, f"outlived the command: {[_command(pid)[:200] for pid in orphans]}"
    finally:
        process.stdout.close()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert until is None or act is None, f"no line began with {until!r}:\n" + "\n".join(lines)
    return Done(status, lines, time.monotonic() - acted)


@dataclass(frozen=True)
class Act:
    """What can be done to a running command."""

    pid: int
    mark: str

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill_a_rank(self) -> None:
        """SIGKILL to the rank that started last."""
        self.send_to_a_rank(signal.SIGKILL)

    def send_to_a_rank(self, number: signal.Signals) -> None:
        """A signal to the rank that started last."""
        alive = marked(self.mark)
        (fork_server,) = [pid for pid in alive if _parent(pid) == self.pid and "_fork_server_main.py" in _command(pid)]
        (parent,) = [pid for pid in alive if _parent(pid) == fork_server]
        os.kill(max(pid for pid in alive if _parent(pid) == parent), number)

    def pids(self, role: str) -> list[int]:
        """The processes of a role: `launcher`, `fork_server`, `parent` (of the ranks), `rank`."""
        alive = marked(self.mark)
        fork_servers = [pid for pid in alive if _parent(pid) == self.pid and "_fork_server_main.py" in _command(pid)]
        parents = [pid for pid in alive if _parent(pid) in fork_servers]
        ranks = sorted(pid for pid in alive if _parent(pid) in parents)
        roles = {"launcher": [self.pid], "fork_server": fork_servers, "parent": parents, "rank": ranks}
        return roles[role]


def marked(mark: str) -> list[int]:
    """Living processes that some command started, direct children or not."""
    results: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                results.append(int(entry.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return results


def _settled(mark: str) -> list[int]:
    """What a command left, after a grace in which it may finish dying."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
