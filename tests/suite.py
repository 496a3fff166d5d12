"""Runs the suite in two processes side by side: tests that share a pool of ranks, which wait for one another much of
the time, and beside them all others; who is done first helps the other (see `halves`).

    python tests/suite.py [options of pytest]

The second has a pool of ranks of its own once it helps.  What it says is printed when both are done.
"""

from __future__ import annotations

import subprocess
import sys
from tempfile import TemporaryDirectory, TemporaryFile

LAST_WORDS_SECONDS = 30.0
"""For the second half after Ctrl-C, which has reached it too: it ends what it has started."""


def main(options: list[str]) -> int:
    """Return 0 where all passed, else the first other exit status."""
    with TemporaryFile() as said, TemporaryDirectory() as claims:
        pytest = [sys.executable, "-m", "pytest", "-q", f"--claims={claims}", *options]
        alone = [*pytest, "-p", "no:cacheprovider", "--half=alone"]
        beside = subprocess.Popen(alone, stdout=said, stderr=subprocess.STDOUT)
        try:
            first = subprocess.run([*pytest, "--half=pooled"]).returncode
            second = beside.wait()
        except KeyboardInterrupt:
            first = second = _ended(beside)
        said.seek(0)
        print(f"\nthe second process:\n{said.read().decode(errors='replace')}", flush=True)
    return first or second


def _ended(half: subprocess.Popen[bytes]) -> int:
    """Wait a while for a half that was interrupted; return its exit status."""
    try:
        return half.wait(LAST_WORDS_SECONDS)
    except subprocess.TimeoutExpired:
        half.kill()
        return half.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
