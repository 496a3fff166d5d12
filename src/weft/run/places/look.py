"""What a machine says of itself to a command that is about to submit a run to it.  Without torch it takes a moment."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from weft.config.cluster import known_machine
from weft.errors import LaunchError
from weft.run.hosts.network import own_address
from weft.version import VERSION


def look(run: Path, network: str | None) -> str:
    """Say what this machine is, for the command that is about to submit a run to it: JSON with `version`, `address`,
    `devices`.

    Raises:
        LaunchError: the machine has no address in the network, or does not see the run's folder.
    """
    above = next(parent for parent in (run, *run.parents) if parent.exists())
    if above == Path("/") and run != above:
        raise LaunchError(f"host {socket.gethostname()} does not see {run}: it must lie on a file system of all hosts.")
    address = own_address(network)
    cluster = known_machine().cluster
    count = cluster.num_accelerators
    devices = f"{count} × {cluster.kinds[0]}" if count else f"{cluster.num_cores} cores"
    return json.dumps({"version": VERSION, "address": address.address, "devices": devices})
