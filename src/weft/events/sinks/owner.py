"""The owner of a run's folder lives as long as events come."""

from __future__ import annotations

import time

from weft.events._owner import Owned
from weft.events._run import Emitted
from weft.events._sinks import Listening

_BEAT_SECONDS = 15.0
"""Time between two signs of life."""


class OwnerSink:
    """Lets the events of a run be its owner's signs of life."""

    def __init__(self, owner: Owned) -> None:
        self._owner = owner
        self._due_at = 0.0

    def take(self, emitted: Emitted) -> None:
        if (now := time.monotonic()) >= self._due_at:
            self._owner.beat()
            self._due_at = now + _BEAT_SECONDS

    def close(self) -> None:
        """The lock outlives the events."""


def create(run: Listening) -> OwnerSink | None:
    """See `weft.events.sinks`."""
    return OwnerSink(run.owner) if run.owner is not None and run.rank == 0 else None
