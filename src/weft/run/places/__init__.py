"""Places that run agents on machines: this machine, ssh, MPI, Slurm, Kubernetes and Ray, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.config.pool import PlaceName
    from weft.run.places.contract import JobPlace


def place_of(name: PlaceName) -> JobPlace:
    """Return a place by its name."""
    from weft.run.places import kubernetes, local, mpi, ray, slurm, ssh

    places: dict[PlaceName, JobPlace] = {
        "local": local.LocalPlace(),
        "ssh": ssh.SshPlace(),
        "mpi": mpi.MpiPlace(),
        "slurm": slurm.SlurmPlace(),
        "kubernetes": kubernetes.KubernetesPlace(),
        "ray": ray.RayPlace(),
    }
    return places[name]
