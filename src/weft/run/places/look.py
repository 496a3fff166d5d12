"""What a machine says of itself to a command that is about to submit a run to it.  Without torch it takes a moment."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from weft.config.cluster import known_machine
from weft.config.document import plain
from weft.errors import LaunchError
from weft.run.hosts.network import own_address
from weft.version import VERSION

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sudo")
_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
"""Folders of the daemons, which are not on every user's PATH."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What a machine says of itself."""

    version: str
    """Version of Weft there."""
    address: str
    """Its IPv4 address in the pool's network."""
    devices: str
    """What it has, as `8 × h100` or `64 cores`."""
    host: str
    """Its own name."""
    num_cores: int
    memory_bytes: int
    num_accelerators: int = 0
    is_root: bool = False
    """Whether commands of the pool run there as root."""
    ray: tuple[str, ...] = ()
    """The command `ray` of the Python that Weft has there; empty: that has no Ray."""
    programs: tuple[str, ...] = ()
    """Names of Slurm's daemons, and of commands that they need, which are installed."""

    def __post_init__(self) -> None:
        ipaddress.IPv4Address(self.address)  # ValueError: it comes from another machine, and is written into files


def look(run: Path, network: str | None) -> str:
    """Say what this machine is, for the command that is about to submit a run to it: `MachineFacts` as JSON.

    Raises:
        LaunchError: the machine has no address in the network, or does not see the run's folder.
    """
    above = next(parent for parent in (run, *run.parents) if parent.exists())
    if above == Path("/") and run != above:
        raise LaunchError(f"host {socket.gethostname()} does not see {run}: it must lie on a file system of all hosts.")
    address = own_address(network)
    cluster = known_machine().cluster
    count = cluster.num_accelerators
    path = f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_FOLDERS}"
    facts = MachineFacts(
        version=VERSION,
        address=address.address,
        devices=f"{count} × {cluster.kinds[0]}" if count else f"{cluster.num_cores} cores",
        host=socket.gethostname(),
        num_cores=cluster.num_cores,
        memory_bytes=cluster.nodes[0].memory_bytes,
        num_accelerators=count or 0,
        is_root=os.geteuid() == 0,
        ray=_ray_command(),
        programs=tuple(name for name in _PROGRAMS if shutil.which(name, path=path)),
    )
    return json.dumps(plain(facts))


def _ray_command() -> tuple[str, ...]:
    if find_spec("ray") is None:
        return ()
    beside = Path(sys.executable).with_name("ray")
    return (str(beside),) if beside.is_file() else (sys.executable, "-m", "ray.scripts.scripts")
