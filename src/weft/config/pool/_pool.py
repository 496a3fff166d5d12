"""What a user writes of a pool, in a TOML file."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from weft.config.document import HIDDEN, Rules
from weft.errors import ClusterError, did_you_mean

_RULES = Rules(ClusterError)

PlaceName = Literal["local", "ssh", "slurm", "ray", "kubernetes", "mpi"]
"""A kind of place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHost:
    """One machine of a pool that has no service of its own."""

    address: str
    """Address at which it is reached, as ssh takes it."""
    devices: int | None = None
    """Its accelerators, or processes; None: it says itself."""
    topology: tuple[str, ...] = ()
    """Where it lies, from the outside in, such as ["spine0", "leaf2"]."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "devices")
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
class MpiSettings:
    """`[mpi]`: machines on which `mpiexec` starts programs."""

    hosts: tuple[PoolHost, ...] = ()
    """The machines; empty: those of the allocation in which the command is given."""
    launcher: tuple[str, ...] = ("mpiexec",)
    """The command of MPICH or Open MPI, with options that the site needs."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        if self.hosts:
            _check_hosts(self)
        if not self.launcher:
            raise _RULES.refuse(self, "launcher", 'is empty. Write the command, such as ["mpiexec"].')


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
class RaySettings:
    """`[ray]`: a cluster under Ray, reached by its dashboard."""

    address: str = "http://127.0.0.1:8265"
    """Address of the dashboard, where jobs are submitted."""
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further resources of each machine that a job takes."""
    selector: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that machines must have."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        if not self.address.startswith(("http://", "https://")):
            raise _RULES.refuse(self, "address", "is no address. Write that of the dashboard: http://HOST:8265.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """`[kubernetes]`: a namespace of a cluster under Kubernetes."""

    image: str
    """Image in which agents run, with Weft inside."""
    volume: str
    """Claim of the volume that holds runs, recipes and data; it is mounted by all machines."""
    mount: str
    """Path at which the volume is mounted; also that of the run's folder as it is given here."""
    namespace: str = "default"
    kind: Literal["jobset", "trainjob"] = "jobset"
    """Kind of object."""
    queue: str | None = None
    """Queue of Kueue; None: no queue."""
    gang: Literal["none", "kueue", "volcano"] = "none"
    """What keeps machines of a job together and starts them at the same time."""
    service_account: str | None = None
    priority_class: str | None = None
    device_resource: str = "nvidia.com/gpu"
    """Name of the accelerators among a machine's resources."""
    shared_memory_bytes: int = 16 << 30
    """Size of /dev/shm, which is 64 MB without."""
    context: str | None = None
    """Context of kubeconfig; None: the one that is set there."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.above_zero(self, "shared_memory_bytes")
        if not self.mount.startswith("/"):
            raise _RULES.refuse(self, "mount", "must be an absolute path.")
        if self.gang == "kueue" and self.queue is None:
            raise _RULES.refuse(self, "queue", "is missing: Kueue admits what names one of its queues.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Machines, the place that starts programs on them, and what the site asks for."""

    place: PlaceName
    name: str = field(default="", metadata=HIDDEN)
    """Name by which `--on` takes it: that of its file."""
    command: tuple[str, ...] = ()
    """Command that starts Weft on its machines, such as ["/shared/venv/bin/weft"]; empty: this Python's."""
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
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Label of the place that says in which unit of a link tier a machine lies, by the tier's name."""
    ssh: SshSettings | None = None
    slurm: SlurmSettings | None = None
    ray: RaySettings | None = None
    kubernetes: KubernetesSettings | None = None
    mpi: MpiSettings | None = None

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "limit_seconds", "grace_seconds")
        if self.network is not None:
            try:
                ipaddress.ip_network(self.network, strict=False)
            except ValueError as error:
                raise _RULES.refuse(self, "network", f"is no network: {error}. Write it as 10.0.0.0/24.") from None
        for other in ("ssh", "slurm", "ray", "kubernetes", "mpi"):
            if other != self.place and getattr(self, other) is not None:
                raise _RULES.refuse(
                    self, "place", f"does not go with [{other}]. Remove that table, or change the place."
                )
        if self.place in ("ssh", "kubernetes") and getattr(self, self.place) is None:
            needs = "its hosts" if self.place == "ssh" else "its image and volume"
            raise _RULES.refuse(self, "place", f"needs a table [{self.place}] with {needs}.")

    @classmethod
    def of_place(cls, place: PlaceName) -> Pool:
        """The pool that `--on PLACE` means where no file describes one.

        Raises:
            ClusterError: the place cannot be used without a file.
        """
        if place in ("ssh", "kubernetes"):
            needs = "the hosts in [ssh]" if place == "ssh" else "image, volume and mount in [kubernetes]"
            raise ClusterError(
                f'--on {place} needs a file: --on {place}:pool.toml, with place = "{place}" and {needs}.'
            )
        return cls(place=place, name=place)


def _check_hosts(settings: SshSettings | MpiSettings) -> None:
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
