"""Helper processes of the data room: fresh interpreters that run one of Weft's own loops and speak plain bytes.

They are neither forked (torch's threads would not survive it) nor multiprocessing's spawn (which runs the user's script
again).  They ignore the signals that stop a run, since the parent decides when to stop, and end when their pipe to the
parent closes, which the system does however the parent dies.  One that is stopped (SIGSTOP) would not notice: so the
system kills it with its parent, where the parent's main thread has started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_BOOT = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "sys.path.insert(0, sys.argv[1]); "
    "from weft.process import die_with; {parent} and die_with({parent}); "
    "from weft.data.{module} import main; main(sys.argv[2:])"
)


def start_child(
    module: str,
    arguments: Sequence[str] = (),
    *,
    descriptors: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    piped: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `weft.data.<module>.main(arguments)` in a fresh interpreter and session.

    Args:
        descriptors: File descriptors that the child inherits under the same numbers.
        environment: Added to the child's environment.
        piped: Whether stdin and stdout are pipes; else the child has none.
    """
    root = str(Path(__file__).resolve().parents[2])
    stream = subprocess.PIPE if piped else subprocess.DEVNULL
    # A thread that ends would take with it what it has started.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    return subprocess.Popen(
        # -P: a file in the working directory must not stand in for a module.
        [sys.executable, "-P", "-c", _BOOT.format(module=module, parent=parent), root, *arguments],
        stdin=stream,
        stdout=stream,
        pass_fds=tuple(descriptors),
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )


def end_child(child: subprocess.Popen[bytes], grace_seconds: float = 0.0) -> None:
    """Wait for a child whose pipe was closed, then kill it."""
    streams: list[IO[bytes] | None] = [child.stdin, child.stdout]
    for stream in streams:
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue
    try:
        child.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def describe_exit(code: int | None) -> str:
    """Say in words how a child ended."""
    if code is None:
        return "was stopped"
    if code < 0:
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    return f"ended with status {code}"
