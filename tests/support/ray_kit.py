"""A real Ray on fake machines: its head on one of them, a node on each other one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machines import Machine

_START = 'mount --bind "$1" "$2" && shift 2 && { "$@" || "$@" || exec "$@"; }'
"""Ray keeps its sockets and logs in one folder of a machine; here all machines see the same files.  A node gives up
after 30 s, which it needs where ten processes share two cores."""
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers that wait for the next job would look like processes that a job has left behind.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_num_workers_soft_limit": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "500",
}
_STORE_BYTES = 80_000_000
_STARTED_SECONDS = 600.0
_POST = "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1], method='POST'), timeout=20).read()"
_GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"


def is_there() -> bool:
    """Whether Ray is installed, and machines can be made for it."""
    return importlib.util.find_spec("ray") is not None and os.geteuid() == 0


@dataclass
class RayMachines:
    """A running Ray."""

    head: Machine
    workers: list[Machine]
    folder: Path
    """Which each machine has for its own."""
    racks: int
    cores: int
    """Of each worker."""
    processes: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    @property
    def address(self) -> str:
        """Of the dashboard, which takes jobs."""
        return f"http://{self.head.address}:8265"

    def get(self, path: str) -> Any:
        """Return what the dashboard answers on the head."""
        said, _ = self.head.start([sys.executable, "-c", _GET, f"{self.address}{path}"]).communicate(timeout=30)
        return json.loads(said)

    def post(self, path: str) -> None:
        """Send a request without content to the dashboard, on the head."""
        said, _ = self.head.start([sys.executable, "-c", _POST, f"{self.address}{path}"]).communicate(timeout=30)
        assert not said, said

    def nodes(self) -> list[dict[str, Any]]:
        """Return the living nodes."""
        found = self.get("/api/v0/nodes?detail=1")["data"]["result"]["result"]
        return [each for each in found if each["state"] == "ALIVE"]

    def held(self) -> dict[str, float]:
        """Return the cores that jobs hold, by node; empty where nobody holds any."""
        report = self.get("/api/cluster_status")["data"]["clusterStatus"]["loadMetricsReport"]
        return {node: used["CPU"][0] for node, used in report["usageByNode"].items() if used.get("CPU", [0])[0] > 0}

    def groups(self) -> list[str]:
        """Return the states of the placement groups that are not removed."""
        found = self.get("/api/v0/placement_groups?detail=1")["data"]["result"]["result"]
        return [each["state"] for each in found if each["state"] != "REMOVED"]

    def start(self, machine: Machine, *options: str) -> None:
        """Start Ray on a machine; it ends with the machine."""
        own = self.folder.with_name(machine.name)
        shutil.rmtree(own, ignore_errors=True)  # of the same machine before it was started again
        own.mkdir()
        words = ["sh", "-c", _START, "sh", str(own), str(self.folder), sys.executable, "-m", "ray.scripts.scripts"]
        words += ["start", "--block", f"--node-ip-address={machine.address}"]
        words += [f"--object-store-memory={_STORE_BYTES}", *options]
        with own.with_suffix(".log").open("w") as output:
            self.processes.append(machine.start(words, output=output, environment=_ENVIRONMENT))

    def join(self, machine: Machine) -> None:
        """Start a node on a worker, for the first time or after it was started again."""
        index = self.workers.index(machine)
        options = [f"--address={self.head.address}:6379", f"--num-cpus={self.cores}"]
        self.start(machine, *options, f"--labels=rack=r{index % self.racks}")

    def wait_for(self, number: int) -> None:
        """Wait until so many nodes live."""
        deadline = time.monotonic() + _STARTED_SECONDS
        while True:
            try:
                if len(self.nodes()) == number:
                    return
            except (ValueError, KeyError, TypeError):
                pass  # the head has not come up yet
            ended = any(process.poll() is not None for process in self.processes)
            assert time.monotonic() < (0 if ended else deadline), (
                f"{number} nodes of Ray have not started:\n{self._logs()}"
            )
            time.sleep(0.5)

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-1000:] for path in self.folder.parent.glob("*.log"))


@contextmanager
def ray_on(hosts: Sequence[Machine], *, racks: int = 2, cores: int = 1) -> Generator[RayMachines]:
    """Start Ray: its head on the first machine, which runs no agents; a node on each other one, whose label `rack` goes
    around among so many.  It ends with the machines."""
    # Sockets lie in there, whose addresses have at most 107 characters: pytest's folders are too deep.
    top = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    try:
        (top / "own").mkdir()
        started = RayMachines(hosts[0], list(hosts[1:]), top / "own", racks, cores)
        address = started.head.address
        listen = [f"--dashboard-host={address}", f"--temp-dir={started.folder}", "--num-cpus=0"]
        started.start(started.head, "--head", "--port=6379", *listen)
        started.wait_for(1)
        for worker in started.workers:
            started.join(worker)
        started.wait_for(len(hosts))
        yield started
    finally:
        shutil.rmtree(top, ignore_errors=True)  # what still runs there ends with the machines
