"""Places that run agents on machines: this machine, ssh, Slurm, Ray, Kubernetes and MPI, one file each."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.config.pool import PlaceName, Pool
    from weft.run.places.contract import Place


def place_of(name: PlaceName) -> Place:
    """Return a place by its name."""
    from weft.run.places import local, slurm, ssh

    places: dict[str, Place] = {"local": local.LocalPlace(), "ssh": ssh.SshPlace(), "slurm": slurm.SlurmPlace()}
    return places[name]


def weft_command(pool: Pool) -> tuple[str, ...]:
    """Return the command that starts Weft on a pool's machines."""
    return pool.command or (sys.executable, "-m", "weft.cli")


def agent_command(pool: Pool, run: object, options: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command of an agent."""
    return (*weft_command(pool), "agent", str(run), *options)
