"""Measurements by `weft probe` of this machine, kept for later runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.config.cluster._cluster import Cluster
from weft.config.cluster._load import dump_cluster, load_cluster
from weft.errors import ClusterError
from weft.files import cache_folder, write_whole

_ADVICE = "weft probe measures this machine once, and predictions get better"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMachine:
    """This machine, as well as it is known."""

    cluster: Cluster
    note: str
    """Return the command that would make the machine better known; empty where it was measured."""


def known_machine(folder: Path | None = None) -> KnownMachine:
    """Return what `keep_machine` has kept of this machine, or what the system says of it.  Never imports torch."""
    machine = Cluster.detect()
    path = _path(machine, folder)
    if not path.is_file():
        return KnownMachine(cluster=machine, note=_ADVICE)
    try:
        return KnownMachine(cluster=load_cluster(path), note="")
    except ClusterError:  # of another version, perhaps
        return KnownMachine(cluster=machine, note=f"{path} cannot be read and is not used: run weft probe again")


def keep_machine(measured: Cluster, folder: Path | None = None) -> Path:
    """Keep what was measured of this machine for `known_machine`, and return the file.

    Raises:
        ClusterError: the file cannot be written.
    """
    path = _path(Cluster.detect(), folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, dump_cluster(measured, header=["measured by weft probe"]))
    except OSError as error:
        raise ClusterError(f"{path} cannot be written: {error.strerror}. Give weft probe an --output.") from None
    return path


_MEASURED = "shared-memory"
"""The code that measured collectives. A file with another name has times that hold no longer, and is not used."""


def _path(machine: Cluster, folder: Path | None) -> Path:
    return (folder or cache_folder("machines")) / f"{machine.digest}-{_MEASURED}.toml"
