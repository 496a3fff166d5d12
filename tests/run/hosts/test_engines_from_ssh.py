"""`weft pools init` on fake machines: what it writes starts a real Slurm, and a real Ray, and ends them again."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts_kit import HostJob, write_recipe
from machines import Machine, machines
from places_kit import COMMAND, PlacedRun, processes_of
from sshd import serve_ssh
from test_ssh import write_pool

STEPS, SECONDS = 20, 480
_OWN = """
set -e
for folder in $1; do
    mkdir -p "$folder"
    mount -t tmpfs -o mode=755 tmpfs "$folder"
done
mkdir -p /run/sshd
"""
"""Gives a machine folders of its own: all fake machines see the same files."""
_RACKS = """
import json, sys, urllib.request
answer = urllib.request.urlopen(f"http://{sys.argv[1]}:8265/api/v0/nodes?detail=1", timeout=60)
for node in json.load(answer)["data"]["result"]["result"]:
    print(node["labels"]["rack"])
"""


@dataclass
class Lab:
    """Machines that ssh reaches and that have no queue; commands are given on a further one."""

    login: Machine
    hosts: list[Machine]
    folder: Path

    def run(self, machine: Machine, *words: str, seconds: float = 240) -> str:
        """Give a command on a machine; return what it says."""
        process = machine.start(words, folder=self.folder)
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{' '.join(words)} has not ended in {seconds} s") from None
        assert process.returncode == 0, said
        return said


@contextmanager
def lab_of(
    folder: Path, number: int, own_folders: Sequence[str], environment: Mapping[str, str] | None = None
) -> Generator[Lab]:
    with machines(number + 1, folder / "machines") as (login, *hosts):
        for host in hosts:
            assert host.start(["sh", "-c", _OWN, "sh", " ".join(own_folders)]).wait(30) == 0
        keys = serve_ssh(hosts, folder / "ssh", environment)
        write_pool(folder / "hosts.toml", hosts, keys)
        yield Lab(login, hosts, folder)


def processes_named(host: Machine, *names: str) -> list[str]:
    """The processes of a machine that have one of these words, but for dead ones, whose end nobody there waits for."""
    lines = processes_of(host).splitlines()
    return [line for line in lines if re.search("|".join(names), line) and not re.search("<defunct>|sshd", line)]


def train_on(lab: Lab, pool: Path, machine: Machine, nodes: str) -> str:
    """Train by the pool that was written; return how the run ended."""
    recipe = write_recipe(lab.folder, steps=STEPS)
    (lab.folder / "plan.toml").write_text(f"[mesh]\nreplicate = {nodes}\n")
    job = HostJob(recipe, lab.folder / "run", "folder", nodes, lab.folder / "plan.toml")
    run = PlacedRun(job, pool, machine)
    status, said = run.submit()
    assert status == 0, said
    return run.wait_until_ended(seconds=SECONDS)


@pytest.mark.needs_root
@pytest.mark.needs_sshd
@pytest.mark.needs_slurm
def test_slurm_starts_trains_and_ends_by_what_is_written(tmp_path: Path) -> None:
    with lab_of(tmp_path, 3, ["/etc/slurm", "/run", "/var/lib"]) as lab:
        first = lab.hosts[0]
        said = lab.run(lab.login, *COMMAND, "pools", "init", "--slurm", "hosts.toml")
        assert "asked     3 hosts: node1, node2, node3" in said
        said = lab.run(lab.login, "sh", "slurm/start.sh")
        assert lab.run(first, "sinfo", "-h", "-o", "%T %D").strip() == "idle 3", said
        started = processes_named(first, "slurm", "munge")
        lab.run(lab.login, "sh", "slurm/start.sh")
        assert processes_named(first, "slurm", "munge") == started, "given again, it starts nothing"
        where = lab.run(first, "srun", "-N3", "sh", "-c", 'echo "$SLURM_TOPOLOGY_ADDR"')
        assert sorted(where.split()) == ["top.rack0.node1", "top.rack0.node3", "top.rack1.node2"]
        assert train_on(lab, tmp_path / "slurm" / "pool.toml", first, "2") == "done"
        lab.run(first, "sbatch", "--output=/dev/null", "--wrap=sleep 600")
        lab.run(lab.login, "sh", "slurm/stop.sh")
        for host in lab.hosts:
            assert processes_named(host, "slurm", "munge", "sleep 600") == []


@pytest.mark.needs_root
@pytest.mark.needs_sshd
@pytest.mark.needs_ray
def test_ray_starts_trains_and_ends_by_what_is_written(tmp_path: Path) -> None:
    # A node gives up after 30 s, which it may need where all machines share two cores.
    with lab_of(tmp_path, 2, [f"{tempfile.gettempdir()}/ray", "/run"], {"RAY_raylet_start_wait_time_s": "300"}) as lab:
        first = lab.hosts[0]
        said = lab.run(lab.login, *COMMAND, "pools", "init", "--ray", "hosts.toml")
        assert "asked     2 hosts: node1, node2" in said
        lab.run(lab.login, "sh", "ray/start.sh", seconds=900)
        listening = lab.run(first, "ss", "-Hltn")
        assert f"{first.address}:8265" in listening
        assert "0.0.0.0:8265" not in listening
        assert sorted(lab.run(first, sys.executable, "-c", _RACKS, first.address).split()) == ["rack0", "rack1"]
        pool = tmp_path / "ray" / "pool.toml"
        assert train_on(lab, pool, lab.login, "2") == "done"
        lab.run(lab.login, "sh", "ray/stop.sh")
        for host in lab.hosts:
            assert processes_named(host, "ray") == []
