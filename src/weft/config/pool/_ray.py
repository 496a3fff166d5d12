"""What a user writes of a pool whose place is Ray."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from weft.config.document import Rules
from weft.errors import ClusterError

_RULES = Rules(ClusterError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """`[ray]`: a cluster under Ray.  Whoever reaches its address can run programs there."""

    address: str = "http://127.0.0.1:8265"
    """Address of its dashboard, which takes jobs.  A public one must begin with https://."""
    token_file: str | None = None
    """File with the cluster's token, which you alone may read; None: it asks for none."""
    labels: tuple[str, ...] = ()
    """Labels of nodes that say where they lie, from the outside in, such as ["spine", "rack"]."""
    wish_wait_seconds: int = 600
    """Longest wait for machines that lie together, where that is a wish."""
    wait_seconds: int = 86_400
    """Longest wait for the machines; then the job has failed."""
    autoscales: bool = False
    """Whether Ray gets machines that are asked for: then it is no mistake that they are not there yet."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 0, "wish_wait_seconds")
        _RULES.at_least(self, 1, "wait_seconds")
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise _RULES.refuse(self, "address", "is no address of a dashboard. Write it as http://10.0.0.1:8265.")
        with suppress(ValueError):  # a name: nobody looks it up
            address = ipaddress.ip_address(parts.hostname)
            if parts.scheme == "http" and not address.is_private:
                raise _RULES.refuse(
                    self, "address", "is public, and without TLS anyone between can run programs there. Use https://."
                )
        for index, label in enumerate(self.labels):
            if not label or any(each.isspace() for each in label):
                raise _RULES.refuse(self, "labels", "is no label's name.", index)
