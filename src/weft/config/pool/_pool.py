"""What a user writes of a pool, in a TOML file."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Literal, get_args

from weft.config.document import HIDDEN, Rules
from weft.config.pool._kubernetes import KubernetesSettings
from weft.config.pool._ray import RaySettings
from weft.errors import ClusterError, did_you_mean

_RULES = Rules(ClusterError)

PlaceName = Literal["local", "ssh", "mpi", "slurm", "kubernetes", "ray"]
"""A kind of place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHost:
    """One machine of a pool that has no service of its own."""

    address: str
    """Address at which it is reached, as ssh takes it."""
    topology: tuple[str, ...] = ()
    """Where it lies, from the outside in, such as ["spine0", "leaf2"]."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        if not self.address or self.address.startswith("-") or any(each.isspace() for each in self.address):
            raise _RULES.refuse(self, "address", "is no address. Write that of a machine, such as 10.0.0.1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """`[ssh]`: machines that ssh reaches.  Keys of hosts must be known; nobody is asked for a password."""

    hosts: tuple[PoolHost, ...]
    """The machines, the preferred ones in front; those that a job does not need are its reserve."""
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    """File of the private key; None: as ssh itself chooses."""
    known_hosts: str | None = None
    """File of the hosts' keys; None: ssh's own."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _check_hosts(self)
        _RULES.at_least(self, 1, "port")


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiSettings(SshSettings):
    """`[mpi]`: machines on which an MPI's launcher starts agents, by ssh.  A job takes the first ones of its hosts."""

    launcher: str = "mpiexec"
    """Command of MPICH or Open MPI, such as "mpirun" or "mpiexec.hydra"; Weft asks it which of them it is."""
    options: tuple[str, ...] = ()
    """Further options of the launcher that the site needs, such as ["--prefix", "/usr/lib64/openmpi"]."""

    def __post_init__(self) -> None:
        SshSettings.__post_init__(self)
        if not self.launcher or self.launcher.startswith("-"):
            raise _RULES.refuse(self, "launcher", 'is no command. Write one such as "mpiexec".')


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """`[slurm]`: a partition of a cluster under Slurm."""

    partition: str | None = None
    """None: the cluster's default partition."""
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    """Features that machines must have."""
    exclusive: bool = True
    """Whether no other job may run on the machines."""
    gpus: bool | None = None
    """Whether accelerators are asked for by `--gpus-per-node`; None: where the gang has any."""
    switch_wait_seconds: int = 600
    """Longest time that Slurm waits for machines under as few switches as are asked for."""
    topology: Literal["tree", "block", "none"] = "tree"
    """How Slurm is told of the network: by `topology/tree`, `topology/block`, or not at all."""
    lines: tuple[str, ...] = ()
    """Further options of sbatch that the site needs, such as ["--licenses=scratch"]."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 0, "switch_wait_seconds")
        for name in ("partition", "account", "qos", "reservation", "constraint"):
            if (value := getattr(self, name)) is not None and (not value or "\n" in value):
                raise _RULES.refuse(self, name, "is no name.")
        for index, line in enumerate(self.lines):
            if not line.startswith("--") or "\n" in line:
                raise _RULES.refuse(self, "lines", "is no option: each begins with --.", index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Machines, the place that starts programs on them, and what the site asks for."""

    place: PlaceName
    """Kind of place: this machine, hosts that ssh or an MPI's launcher reaches, Slurm, Kubernetes or Ray."""
    name: str = field(default="", metadata=HIDDEN)
    """Name by which `--on` takes it: that of its file."""
    command: tuple[str, ...] = ()
    """Command that starts Weft there, such as ["/shared/venv/bin/weft"]; empty: this Python's, in an image `weft`."""
    network: str | None = None
    """Network on which its machines reach one another, such as "10.0.0.0/24"; None: each has one address."""
    rendezvous: str = "folder"
    """How machines of a job meet: by the run's "folder", or etcd://host:port,…."""
    cluster: str | None = None
    """What its machines are, for the planner: a file, or such as "16x8xh100"; None: like this one."""
    limit_seconds: int | None = None
    """Longest time of a job; None: the place's own limit."""
    grace_seconds: int = 120
    """Time between the word to stop and the end: ask for twice of what a save takes."""
    ssh: SshSettings | None = None
    """The hosts, where the place is ssh."""
    mpi: MpiSettings | None = None
    """The hosts and the launcher, where the place is MPI."""
    slurm: SlurmSettings | None = None
    """The partition, where the place is Slurm; None: the cluster's default."""
    kubernetes: KubernetesSettings | None = None
    """The namespace, where the place is Kubernetes."""
    ray: RaySettings | None = None
    """The cluster, where the place is Ray; None: one whose head is this machine."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "limit_seconds", "grace_seconds")
        if self.network is not None:
            try:
                ipaddress.ip_network(self.network, strict=False)
            except ValueError as error:
                raise _RULES.refuse(self, "network", f"is no network: {error}. Write it as 10.0.0.0/24.") from None
        for other in ("ssh", "mpi", "slurm", "kubernetes", "ray"):
            if other != self.place and getattr(self, other) is not None:
                raise _RULES.refuse(
                    self, "place", f"does not go with [{other}]. Remove that table, or change the place."
                )
        if self.place in ("ssh", "mpi") and self.ssh is None and self.mpi is None:
            raise _RULES.refuse(self, "place", f"needs a table [{self.place}] with its hosts.")
        if self.place == "kubernetes" and self.kubernetes is None:
            raise _RULES.refuse(self, "place", "needs a table [kubernetes] with its image and volumes.")

    @classmethod
    def of_place(cls, place: PlaceName) -> Pool:
        """The pool that `--on PLACE` means where no file describes one.

        Raises:
            ClusterError: the place cannot be used without a file.
        """
        if place in ("ssh", "mpi"):
            raise ClusterError(
                f'--on {place} needs a file: --on {place}:pool.toml, with place = "{place}" and the hosts in [{place}].'
            )
        if place == "kubernetes":
            raise ClusterError(
                '--on kubernetes needs a file: --on kubernetes:pool.toml, with place = "kubernetes", and the image and'
                " the volumes in [kubernetes]."
            )
        return cls(place=place, name=place)


def _check_hosts(settings: SshSettings) -> None:
    if not settings.hosts:
        raise _RULES.refuse(settings, "hosts", 'is empty. List the machines: [{ address = "10.0.0.1" }].')
    seen: set[str] = set()
    for index, host in enumerate(settings.hosts):
        if host.address in seen:
            raise _RULES.refuse(settings, "hosts", "is listed twice.", index, "address")
        seen.add(host.address)


def unknown_pool(name: str, known: list[str]) -> ClusterError:
    """Return the error that no pool has this name."""
    places = list(get_args(PlaceName))
    pools = f" Pools: {', '.join(known)}." if known else ""
    return ClusterError(
        f"--on {name}: there is no such pool or place.{did_you_mean(name, [*known, *places])}{pools}"
        f" Places: {', '.join(places)}. A file of your own is given as PLACE:FILE.toml."
    )
