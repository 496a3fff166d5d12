"""A real Slurm of two nodes on this machine: its controller, its daemons and munge, without accounting or cgroups."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from machines import Machine

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=20
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdTimeout=10
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_MUNGE = Path("/run/munge")


def is_there() -> bool:
    """Whether Slurm is installed."""
    return all(shutil.which(name) for name in ("slurmctld", "slurmd", "sbatch", "munged")) and os.geteuid() == 0


@dataclass(frozen=True)
class Slurm:
    """A running Slurm."""

    environment: dict[str, str]

    def ask(self, *words: str, folder: Path | None = None) -> str:
        """Run one of Slurm's commands, and return what it prints."""
        done = subprocess.run(words, env=self.environment, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()


@contextmanager
def slurm(folder: Path) -> Generator[Slurm]:
    """Start Slurm, and end it with all that runs under it."""
    ports = _ports()
    nodes = f"NodeName=node[0-1] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2"
    environment = _configure(folder, f"localhost(127.0.0.1)\nSlurmctldPort={ports[0]}", nodes, ["node0", "node1"])
    commands = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "node0"], ["slurmd", "-D", "-N", "node1"]]
    if not (_MUNGE / "munge.socket.2").exists():
        commands.insert(0, _munged())
    with ExitStack() as stack:
        output = stack.enter_context((folder / "daemons.log").open("w"))
        for command in commands:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            time.sleep(0.3)
        started = Slurm(environment)
        deadline = time.monotonic() + 20
        while started.ask("sinfo", "-h", "-o", "%t %D") != "idle 2":
            if time.monotonic() > deadline:
                raise TimeoutError((folder / "daemons.log").read_text()[-2000:])
            time.sleep(0.1)
        yield started


@contextmanager
def slurm_on(
    login: Machine,
    workers: Sequence[Machine],
    folder: Path,
    *,
    more: str = "",
    leaves: Mapping[str, Sequence[str]] | None = None,
) -> Generator[dict[str, str]]:
    """Run Slurm on fake machines, its controller on one of them; yield what its commands need in their environment.
    It ends with the machines.

    Args:
        more: further lines of the configuration.
        leaves: the machines under each leaf switch, all of which hang on one `spine`.
    """
    nodes = "\n".join(f"NodeName={each.name} NodeAddr={each.address} CPUs=2 RealMemory=1000" for each in workers)
    environment = _configure(folder, f"{login.name}({login.address})", nodes, [each.name for each in workers])
    with (folder / "slurm.conf").open("a") as file:
        file.write(more)
        if leaves is not None:
            file.write("TopologyPlugin=topology/tree\n")
    if leaves is not None:
        switches = [f"SwitchName={leaf} Nodes={','.join(names)}" for leaf, names in leaves.items()]
        switches.append(f"SwitchName=spine Switches={','.join(leaves)}")
        (folder / "topology.conf").write_text("\n".join(switches) + "\n")
    with ExitStack() as stack:
        output = stack.enter_context((folder / "daemons.log").open("w"))
        if not (_MUNGE / "munge.socket.2").exists():
            munge = subprocess.Popen(_munged(), stdout=output, stderr=output)
            stack.callback(munge.wait)
            stack.callback(munge.terminate)
            time.sleep(0.3)
        login.start(["slurmctld", "-D"], output=output, environment=environment)
        for each in workers:
            start_daemon(each, environment)
        deadline = time.monotonic() + 20
        while _printed(login, ["sinfo", "-h", "-o", "%t %D"], environment) != f"idle {len(workers)}":
            if time.monotonic() > deadline:
                raise TimeoutError((folder / "daemons.log").read_text()[-2000:])
            time.sleep(0.2)
        yield environment


def start_daemon(host: Machine, environment: Mapping[str, str]) -> None:
    """Start Slurm's daemon on a machine, as its boot would."""
    with (Path(environment["SLURM_CONF"]).parent / "daemons.log").open("a") as output:
        host.start(["slurmd", "-D", "-N", host.name], output=output, environment=environment)


def _printed(host: Machine, words: list[str], environment: dict[str, str]) -> str:
    said, _ = host.start(words, environment=environment).communicate(timeout=30)
    return said.strip()


def _configure(folder: Path, controller: str, nodes: str, names: list[str]) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    for name in ("state", *(f"spool-{name}" for name in names)):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(_CONFIGURATION.format(folder=folder, controller=controller, nodes=nodes))
    return {**os.environ, "SLURM_CONF": str(configuration)}


def _munged() -> list[str]:
    """The command of the service that signs what Slurm's parts say."""
    _MUNGE.mkdir(exist_ok=True)
    shutil.chown(_MUNGE, "munge", "munge")
    return ["setpriv", "--reuid=munge", "--regid=munge", "--init-groups", "munged", "--foreground"]


def _ports() -> list[int]:
    """A free port, and two that follow one another."""
    for first in range(27_000, 28_000, 3):
        ports = [first, first + 1, first + 2]
        if not any(_is_taken(port) for port in ports):
            return ports
    raise OSError("no free ports")


def _is_taken(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
