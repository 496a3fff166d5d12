"""Runs PyTorch's own distributed tests, as the wheel brings them, over one backend.

    python torch_suite.py BACKEND WORLD PATIENCE_SECONDS

The names of tests come by standard input, one a line; an outcome for each goes to standard output, as a line of JSON.
Each test's ranks are forked from this process, which has imported the suite and computed nothing: a test costs what it
does, and one that hangs or crashes harms no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

_GRACE_SECONDS = 3.0
"""How long the other ranks may go on after the first has failed."""
_ASK_FOR_GLOO = ("test_accumulate_gradients_no_sync",)
"""How tests begin that do nothing unless they are told that the backend is Gloo (or NCCL, or MPI)."""


def load_suite(backend: str, world: int) -> ModuleType:
    """Import the suite, whose decorators read the environment.  They are told Gloo: what is only for it is run, too."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as suite

    suite.BACKEND = backend
    for listed in (
        suite.PROFILING_SUPPORTED_BACKENDS,
        suite.CUDA_PROFILING_SUPPORTED_BACKENDS,
        suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        listed.append(backend)
    for feature in common_distributed.DistTestCases.backend_feature.values():
        if "gloo" in feature:
            feature.add(backend)
    return suite


def all_tests(suite: ModuleType) -> list[str]:
    """Return the names of the tests, in the order of the file."""
    return [name for name in vars(suite.DistributedTest._DistTestBase) if name.startswith("test_")]


def _case(suite: ModuleType, test: str, rank: int, store: Path) -> Any:
    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        world_size = int(os.environ["WORLD_SIZE"])

    case = Case(test)
    case.rank, case.file_name = rank, str(store)
    return case


def _be_rank(suite: ModuleType, backend: str, test: str, rank: int, folder: Path, patience: float) -> dict[str, str]:
    """Run a test as one of its ranks."""
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    from weft.comm.shared_memory import register_shared_memory_backend

    register_shared_memory_backend()
    os.environ.update(TEMP_DIR=str(folder), RANK=str(rank), TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"))
    seconds = suite.CUSTOM_PG_TIMEOUT.get(test, patience)
    world = int(os.environ["WORLD_SIZE"])
    case = _case(suite, test, rank, folder / "store")
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        world_size=world,
        rank=rank,
        timeout=timedelta(seconds=seconds),
    )
    suite.Barrier.sync(timeout=30)
    common_utils.set_rng_seed()
    if test.startswith(_ASK_FOR_GLOO):
        suite.BACKEND = "gloo"
    try:
        getattr(case, test)()
        suite.Barrier.sync(timeout=30)
        if dist.is_initialized():
            dist.destroy_process_group()
    except SystemExit as skipped:  # what the decorators of the suite do
        return {"outcome": "skipped", "why": f"exit {skipped.code}"}
    except BaseException as problem:
        if type(problem).__name__ == "SkipTest":
            return {"outcome": "skipped", "why": str(problem)}
        return {"outcome": "failed", "why": traceback.format_exc()[-6000:]}
    return {"outcome": "passed", "why": ""}


def _fork(suite: ModuleType, backend: str, test: str, rank: int, folder: Path, patience: float) -> tuple[int, int]:
    """Start a rank; return its process, and where its outcome comes."""
    here, there = os.pipe()
    pid = os.fork()
    if pid:
        os.close(there)
        return pid, here
    try:
        os.setsid()  # so that what the test has started can be ended with it
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            outcome = _be_rank(suite, backend, test, rank, folder, patience)
        except BaseException:
            outcome = {"outcome": "failed", "why": traceback.format_exc()[-6000:]}
        os.write(there, json.dumps(outcome).encode())
    finally:
        os._exit(0)  # not by way of what this process has inherited


def _collect(ranks: dict[int, tuple[int, int]], limit: float) -> dict[int, dict[str, str]]:
    outcomes: dict[int, dict[str, str]] = {}
    deadline = time.monotonic() + limit
    with selectors.DefaultSelector() as waiting:
        for rank, (_, pipe) in ranks.items():
            waiting.register(pipe, selectors.EVENT_READ, rank)
        while len(outcomes) < len(ranks) and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                text = os.read(key.fd, 1 << 16)
                outcomes[key.data] = (
                    json.loads(text) if text else {"outcome": "failed", "why": "the process ended by itself"}
                )
                waiting.unregister(key.fd)
                if outcomes[key.data]["outcome"] == "failed":
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for rank, (pid, pipe) in ranks.items():
        os.close(pipe)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        outcomes.setdefault(rank, {"outcome": "hung", "why": f"no result after {limit:g} s"})
    return outcomes


def run_test(suite: ModuleType, backend: str, test: str, patience: float) -> dict[str, Any]:
    """Run one test on all its ranks."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-torch-suite-") as name:
        folder = Path(name)
        (folder / "barrier").mkdir()
        (folder / "test_dir").mkdir()
        world = int(os.environ["WORLD_SIZE"])
        ranks = {rank: _fork(suite, backend, test, rank, folder, patience) for rank in range(world)}
        outcomes = _collect(ranks, suite.CUSTOM_PG_TIMEOUT.get(test, patience) + 10)
    worst = min(outcomes.values(), key=lambda found: ("failed", "hung", "skipped", "passed").index(found["outcome"]))
    return {"test": test, "backend": backend, "seconds": round(time.monotonic() - began, 2), **worst}


def main(backend: str, world: int, patience: float) -> None:
    """Run the tests whose names come."""
    random.seed(0)
    suite = load_suite(backend, world)
    for line in sys.stdin:
        test = line.strip()
        for name in all_tests(suite) if test == "*" else [test]:
            print(json.dumps(run_test(suite, backend, name, patience)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
