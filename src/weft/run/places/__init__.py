"""Places that run agents on machines: this machine, ssh, Slurm, Ray, Kubernetes and MPI, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.config.pool import PlaceName
    from weft.run.places.contract import JobPlace


def place_of(name: PlaceName) -> JobPlace:
    """Return a place by its name.

    Raises:
        LaunchError: Weft cannot use it yet.
    """
    from weft.errors import LaunchError
    from weft.run.places import local, slurm, ssh

    places: dict[str, JobPlace] = {"local": local.LocalPlace(), "ssh": ssh.SshPlace(), "slurm": slurm.SlurmPlace()}
    if name not in places:
        raise LaunchError(f"--on {name} is not there yet. Places that are: {', '.join(places)}.")
    return places[name]
