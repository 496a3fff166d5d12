"""`[kubernetes]`: what a pool says of a cluster under Kubernetes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.config.document import Rules
from weft.errors import ClusterError

_RULES = Rules(ClusterError)
_LABEL = re.compile(r"[\w./-]+=[\w.-]*")
_TOLERATION = re.compile(r"[\w./-]+(=[\w.-]*)?(:(NoSchedule|NoExecute|PreferNoSchedule))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedVolume:
    """A volume that each machine sees."""

    claim: str
    """Name of the PersistentVolumeClaim; several machines must be able to mount it (ReadWriteMany)."""
    path: str
    """Folder at which it is mounted: that under which the submitting machine sees it, too."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        if not self.path.startswith("/"):
            raise _RULES.refuse(self, "path", "must begin with /.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """`[kubernetes]`: a namespace of a cluster under Kubernetes 1.31 or newer, which `kubectl` reaches."""

    image: str
    """Container image that has Weft and what the recipe imports."""
    volumes: tuple[ClaimedVolume, ...]
    """Volumes that hold the run's folder, the recipe and the data."""
    context: str | None = None
    """Context of kubectl's configuration; None: its current one."""
    namespace: str | None = None
    """None: that of the context."""
    queue: str | None = None
    """Kueue's queue, which admits a gang as a whole; None: the cluster's scheduler places machine by machine."""
    priority: str | None = None
    """Name of the PriorityClass."""
    service_account: str | None = None
    pull_secrets: tuple[str, ...] = ()
    """Secrets with which the image is pulled."""
    user: int | None = None
    """Number of the user that agents run as, who must be able to read the run's folder; None: the image's."""
    group: int | None = None
    device_resource: str = "nvidia.com/gpu"
    """What the cluster calls an accelerator."""
    memory: str | None = None
    """Memory of a machine, such as "512Gi"; None: no limit is asked for."""
    node_labels: tuple[str, ...] = ()
    """Labels that nodes must have, such as ["pool=train"]."""
    tolerations: tuple[str, ...] = ()
    """Taints of nodes that are borne, such as ["nvidia.com/gpu:NoSchedule"]."""
    topology: tuple[str, ...] = ()
    """Labels of nodes that say where they lie, from the outside in, such as ["lab/spine", "lab/leaf"]."""
    host_network: bool = False
    """Whether ranks use the node's own network, as some drivers of fast networks need."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        if not self.image:
            raise _RULES.refuse(self, "image", "is empty. Name an image that has Weft.")
        if not self.volumes:
            raise _RULES.refuse(
                self, "volumes", 'is empty. The run\'s folder needs one: [{ claim = "…", path = "/…" }].'
            )
        for name, pattern, example in (
            ("node_labels", _LABEL, "pool=train"),
            ("tolerations", _TOLERATION, "nvidia.com/gpu:NoSchedule"),
        ):
            for index, text in enumerate(getattr(self, name)):
                if not pattern.fullmatch(text):
                    raise _RULES.refuse(self, name, f"cannot be read. Write it as {example}.", index)
