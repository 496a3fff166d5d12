"""The error of a rank 0 that is to listen at a port where another process does."""

from __future__ import annotations

import socket

from weft.errors import LaunchError


def explained(problem: Exception, port: str, *, is_host: bool) -> Exception:
    """Return the error to raise for one of a store: the same, unless this process was to listen at a taken port."""
    if not is_host or "EADDRINUSE" not in str(problem):
        return problem
    with socket.create_server(("", 0)) as free:
        other = free.getsockname()[1]
    return LaunchError(
        f"rank 0 is to listen at port {port} of this host, and another process does: maybe another job. Start all ranks"
        f" with another port that is free, such as MASTER_PORT={other}."
    )
