"""PyTorch's own distributed tests, from the installed wheel: what passes on Gloo passes over shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WORLD = 3
"""As PyTorch runs them; its groups of some ranks are [1, 2]."""
PATIENCE_SECONDS = 40
SUITE = Path(__file__).with_name("torch_suite.py")

OF_GLOO_ALONE = {
    "test_monitored_barrier_gloo": "torch itself refuses monitored_barrier for any group not named gloo",
    "test_monitored_barrier_gloo_subgroup": "torch itself refuses monitored_barrier for any group not named gloo",
    "test_ddp_logging_data_cpu": "compares the backend's name with 'gloo'",
}
"""What passes on Gloo alone: why."""

SOME = [
    "test_all_gather_coalesced_simple",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_full_group",
    "test_get_backend",
    "test_send_recv_torch_profiler",
]
"""Those that shared memory failed once, and the profiler's."""


class Runner:
    """A process that runs tests on one backend, one after another."""

    def __init__(self, backend: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            [sys.executable, str(SUITE), backend, str(WORLD), str(PATIENCE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )

    def ask(self, test: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{test}\n")
        self._process.stdin.flush()

    def outcome(self) -> dict[str, Any]:
        """Of the first test asked for whose outcome was not read yet."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that runs PyTorch's tests has ended"
        return json.loads(line)

    def run(self, test: str) -> dict[str, Any]:
        self.ask(test)
        return self.outcome()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def _runners() -> Generator[tuple[Runner, Runner]]:
    gloo, weft = Runner("gloo"), Runner("weft")
    try:
        yield gloo, weft
    finally:
        gloo.close()
        weft.close()


def _names() -> list[str]:
    """Ask in a process of its own: the suite changes what it is imported into."""
    text = "import sys, torch_suite as t; print('\\n'.join(t.all_tests(t.load_suite('gloo', 3))))"
    done = subprocess.run([sys.executable, "-c", text], cwd=SUITE.parent, capture_output=True, text=True, check=True)
    return done.stdout.split()


def _compare(tests: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return what passes on Gloo, and of it what does not over shared memory, with the reason."""
    passed: list[str] = []
    failed: dict[str, str] = {}
    with _runners() as (gloo, weft):
        for test in tests:
            if gloo.run(test)["outcome"] == "passed":
                passed.append(test)
                weft.ask(test)  # which goes on beside the next one on Gloo
        for test in passed:
            found = weft.outcome()
            assert found["test"] == test
            if found["outcome"] != "passed":
                failed[test] = found["why"]
        for test in failed.keys() - OF_GLOO_ALONE.keys():  # another load, another chance: many have short timeouts
            if weft.run(test)["outcome"] == "passed":
                del failed[test]
    return passed, failed


def _check(passed: Sequence[str], failed: dict[str, str]) -> None:
    unexpected = {test: why for test, why in failed.items() if test not in OF_GLOO_ALONE}
    assert not unexpected, "\n\n".join(f"{test}:\n{why[-1500:]}" for test, why in unexpected.items())
    assert not (OF_GLOO_ALONE.keys() & set(passed)) - failed.keys(), "these pass now: take them out of the table"


@pytest.mark.parametrize("which", ["some", "all"])
def test_what_passes_on_gloo_passes_over_shared_memory(which: str) -> None:
    passed, failed = _compare(SOME if which == "some" else _names())
    _check(passed, failed)
    assert len(passed) >= (len(SOME) if which == "some" else 90), "PyTorch's suite was not run"
