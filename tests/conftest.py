"""Fixtures of the whole suite: the pool of ranks, and the checks that a test leaves nothing behind."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import browser
import halves
import hypothesis
import own_cache
import pool
import pytest
import ray_kit
import slurm
import sshd
import tiers

if TYPE_CHECKING:
    from weft.run.launch.launcher import ForkServer

# A container's usual setting, which makes each of the suite's hundreds of processes compile Weft's modules again:
# 0.3 s of 0.4 s in which `weft --help` starts (Xeon 2.5 GHz, 2026-11-22).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# An example that takes 200 ms on a machine with other work says nothing of the code.
hypothesis.settings.register_profile("weft", deadline=None)
hypothesis.settings.load_profile("weft")

LEARNED = own_cache.isolate()
"""What runs of the suite teach predictions: in the user's cache it would change plans of later runs, and those of the
user would change what tests find."""

LEAK_GRACE_SECONDS = 3.0
CHANGED_BY_TORCH = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
"""Environment variables that pytest and torch set on their own, torch with the first of its optimizers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-report", metavar="PATH", help="write the table of `make parity` as Markdown")
    backends = ("gloo", "cpu:weft")
    parser.addoption("--parity-backend", default="gloo", choices=backends, help="of the ranks of `make parity`")
    parser.addoption("--claims", metavar="FOLDER", type=Path, help="of two that share the suite; see `halves`")
    parser.addoption("--half", choices=("pooled", "alone"), default="alone", help="of which this process begins with")


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[pool.RankPool]:
    """Eight rank processes, started when first used; see `pool.RankPool.run`."""
    made = pool.RankPool(8, pytestconfig.getini("filterwarnings"))
    pytestconfig.stash[_POOL] = made
    yield made
    made.close()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """What ranks of `weft.run.launch` are forked from, by tests of what they do: each would import torch again."""
    from weft.run.launch.launcher import ForkServer

    with ForkServer(preload=("weft.api",)) as made:
        yield made


@dataclass(frozen=True)
class Need:
    """Something that a marked test needs and not every machine has."""

    is_met: Callable[[], bool]
    reason: str
    may_lack_in_ci: bool = False


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make slow`; where the whole suite is collected, check the table."""
    families = tiers.read_families()
    tiers.mark_slow(items, families)
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and not (config.option.ignore or config.option.ignore_glob or config.option.deselect):
        found = tiers.mistakes([item.nodeid for item in items], families)
        if found:
            raise pytest.UsageError(f"{tiers.TABLE.name}: " + "; ".join(found))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run this process's share of the suite, where there are two; else leave the tests to pytest."""
    _freeze()
    claims: Path | None = session.config.getoption("--claims")
    if claims is None or session.testsfailed or session.config.option.collectonly:
        return None
    halves.run(session, claims, pooled=session.config.getoption("--half") == "pooled")
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Run a test; behind the last of a file, let what it has imported be no garbage any more."""
    known = len(sys.modules)
    result = yield
    if len(sys.modules) > known + _MANY_MODULES or nextitem is None or nextitem.path != item.path:
        _freeze()
    return result


_MANY_MODULES = 100


def _freeze() -> None:
    """Spare what lives until the end the search for garbage.  A session collects it twice, as groups of processes hold
    threads until then: among 10,000 tests and all modules that took 0.2 to 0.5 s each time."""
    gc.collect()
    gc.freeze()


NEEDS = {
    "gpu": Need(_has_gpu, "needs a CUDA device; run it there with `make gpu`", may_lack_in_ci=True),
    "needs_root": Need(lambda: os.geteuid() == 0, "needs root, to make network namespaces"),
    "needs_etcd": Need(lambda: shutil.which("etcd") is not None, "needs etcd (apt-get install etcd-server)"),
    "needs_slurm": Need(slurm.is_there, "needs root and Slurm (apt-get install slurmctld slurmd slurm-client munge)"),
    "needs_sshd": Need(sshd.is_there, "needs root and OpenSSH (apt-get install openssh-server)"),
    "needs_kubectl": Need(lambda: shutil.which("kubectl") is not None, "needs kubectl 1.25 or newer"),
    "needs_ray": Need(ray_kit.is_there, "needs root and Ray (pip install -e .[ray])", may_lack_in_ci=True),
    "needs_mpi": Need(
        lambda: None not in (shutil.which("mpiexec.mpich"), shutil.which("mpirun.openmpi")),
        "needs MPICH and Open MPI (apt-get install mpich openmpi-bin)",
    ),
    "needs_chromium": Need(lambda: shutil.which("chromium") is not None, "needs Chromium (apt-get install chromium)"),
    "needs_prometheus": Need(
        lambda: shutil.which("prometheus") is not None, "needs Prometheus (apt-get install prometheus)"
    ),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs what is not here, and say why; where CI=true that is a failure."""
    for name, need in NEEDS.items():
        if item.get_closest_marker(name) is None or need.is_met():
            continue
        if os.environ.get("CI") and not need.may_lack_in_ci:
            pytest.fail(f"{need.reason}; under CI it must be there", pytrace=False)
        pytest.skip(need.reason)


_SHARED_MEMORY = Path("/dev/shm")
_POOL = pytest.StashKey[pool.RankPool]()


@dataclass(frozen=True)
class _Traces:
    """What a test could leave behind, seen at one moment."""

    processes: dict[int, str]
    """Process id → command line."""
    ports: set[str]
    shared_memory: set[str]
    """Names of files, anybody's: of those that have come, only the suite's own count."""
    threads: set[threading.Thread]

    @classmethod
    def seen(cls, config: pytest.Config) -> _Traces:
        made = config.stash.get(_POOL, None)
        known = pool.helper_pids() | browser.pids(config) | (made.pids() if made is not None else set[int]())
        alive = pool.descendants(os.getpid())
        return cls(
            processes={pid: name for pid, name in alive.items() if pid not in known},
            ports=pool.listening_ports({os.getpid(), *alive}),
            shared_memory=set(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.is_dir() else set(),
            threads=pool.living_threads(),
        )

    def since(self, before: _Traces) -> dict[str, object]:
        """What has come since, by what it is."""
        files = {name for name in self.shared_memory - before.shared_memory if _is_ours(_SHARED_MEMORY / name)}
        new = {
            "processes": {pid: name for pid, name in self.processes.items() if pid not in before.processes},
            "listening ports": self.ports - before.ports,
            "shared memory": files - pool.mapped_elsewhere(files) if files else files,
            "threads": self.threads - before.threads,
        }
        return {what: left for what, left in new.items() if left}


@pytest.fixture(autouse=True)
def nothing_learned() -> None:
    """Begin each test without recorded runs, which would correct what it predicts."""
    shutil.rmtree(LEARNED, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, a listening port, shared memory, a thread or a changed environment."""
    environment = {name: value for name, value in os.environ.items() if name not in CHANGED_BY_TORCH}
    before = _Traces.seen(request.config)
    yield
    after = {name: value for name, value in os.environ.items() if name not in CHANGED_BY_TORCH}
    changed = {name for name in environment.keys() | after.keys() if environment.get(name) != after.get(name)}
    assert not changed, f"changed environment variables: {sorted(changed)}"
    deadline = time.monotonic() + LEAK_GRACE_SECONDS  # in which processes may finish dying
    while (left := _Traces.seen(request.config).since(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, "left behind: " + "; ".join(f"{what}: {which}" for what, which in left.items())


def _is_ours(entry: Path) -> bool:
    try:
        return entry.stat().st_uid == os.getuid()
    except FileNotFoundError:  # gone since it was listed
        return False
