"""The registry of a job: a few small values that all of its hosts see, and a list of the hosts that are there.

It is kept by a service that is not Weft's: etcd, or torch's TCPStore on one of the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from weft.errors import LaunchError


class RegistryLostError(LaunchError):
    """The registry cannot be reached.  It may be again."""


class Registry(Protocol):
    """The registry as one host uses it.  Every call ends within a few seconds, or raises `RegistryLostError`.

    Nothing that is read here can be trusted: `weft.run.hosts.membership` signs what it writes.
    """

    def join(self, value: Callable[[str], str]) -> str:
        """Add this host to the list, with the value that `value` makes of its name there; return that name.  The host
        stays as long as this process calls `beat`."""
        ...

    def beat(self) -> bool:
        """Give a sign of life; call it every `BEAT_SECONDS`.  False: this host has been taken off the list."""
        ...

    def members(self) -> list[tuple[str, str]]:
        """Return the hosts that are there: name and value of each, the one that joined first in front."""
        ...

    def get(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the values of those keys that have one."""
        ...

    def put(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def create(self, key: str, value: str) -> bool:
        """Write a value where the key has none.  False: another host was first."""
        ...

    def leave(self) -> None:
        """Take this host off the list."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


LEASE_SECONDS = 3.0
"""Time without a sign of life after which a host is off the list."""
FENCE_SECONDS = 2.0
"""Time without an answer after which a host ends its ranks.  The others begin again after a lease at the earliest; the
second between covers the look, the kill, and what a sign of life takes."""
BEAT_SECONDS = 0.5
"""Interval of the signs of life."""
MOST_BYTES = 1 << 20
"""Size of the largest value."""
