"""Membership: one host's view of the job, kept fresh by a thread, and what the host says to the others.

The host that joined first leads: it writes the rosters.  A host whose view is older than a lease is on its own: it ends
its ranks before the others count it as gone, since they then go on without it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self, final

from weft.errors import LaunchError
from weft.run.hosts.registry import BEAT_SECONDS, LEASE_SECONDS, Registry, RegistryLostError
from weft.run.hosts.roster import HostFacts, Roster, end_of_json, end_to_json
from weft.run.hosts.signed import JobSecret
from weft.run.launch.job_end import JobEnd

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
"""Interval at which the registry is read; a read takes under 1 ms on one network."""
_ROSTER, _LATEST, _VERDICT, _END, _HOST = "roster", "latest", "verdict", "end", "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """How the whole job ended; every host then ends, too."""

    status: int
    """Exit status of the leader's command."""
    text: str
    """What the other hosts say."""
    mark: str = field(default_factory=lambda: os.urandom(8).hex())
    """Tells it from the verdict on an earlier job in the same folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The job as this host sees it at one moment."""

    members: Mapping[str, HostFacts] = field(default_factory=dict[str, HostFacts])
    """The hosts that are there, the one that joined first in front."""
    roster: Roster | None = None
    """The newest generation."""
    ends: Mapping[str, JobEnd] = field(default_factory=dict[str, JobEnd])
    """How the ranks of that generation ended, by host, the one that was heard of first in front."""
    verdict: JobVerdict | None = None


@final
class Membership:
    """One host's place among the hosts of a job.  Use it as a context manager: it joins and leaves."""

    def __init__(
        self, registry: Registry, secret: JobSecret, facts: HostFacts, *, beat: Callable[[], object] = lambda: None
    ) -> None:
        """`beat` is called with every sign of life: the leader renews its hold on the run's folder there."""
        self._registry = registry
        self._secret = secret
        self._facts = facts
        self._also_beat = beat
        self.name = ""
        """This host's name in the registry."""
        self._changed = threading.Condition()
        self._view = JobView()
        self._seen_at = time.monotonic()
        self._lost = ""
        self._old_verdict: str | None = None
        """JobVerdict on an earlier job, which this one goes on with."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="weft-membership", daemon=True)
        self._strangers: set[str] = set()

    def __enter__(self) -> Self:
        self._old_verdict = self._registry.get([_VERDICT]).get(_VERDICT)
        self.name = self._registry.join(self._secret.sign(_HOST, asdict(self._facts)))
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        # A call may hang in a network that is gone.  The thread is a daemon and holds nothing that others need.
        self._thread.join(0.0 if self.is_lost else LEASE_SECONDS)
        if not self._thread.is_alive() and not self.is_lost:
            try:
                self._registry.leave()
            except RegistryLostError as error:
                logger.debug("%s", error)
            self._registry.close()

    @property
    def view(self) -> JobView:
        """The job as it was seen last."""
        return self._view

    @property
    def is_lost(self) -> bool:
        """Whether this host is on its own: it could not read the registry for a lease, or was taken off the list."""
        return bool(self.why_lost)

    @property
    def why_lost(self) -> str:
        """Why this host is on its own; empty: it is not."""
        silent = time.monotonic() - self._seen_at
        if not self._lost and silent >= LEASE_SECONDS:
            return f"the registry of the job has not answered for {silent:.1f} s"
        return self._lost

    @property
    def is_leader(self) -> bool:
        """Whether this host joined first of those that are there."""
        return next(iter(self._view.members), None) == self.name

    def wait(self, until: Callable[[JobView], bool], seconds: float) -> bool:
        """Wait until the view is as wanted; False: it was not in time, or this host is on its own."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not until(self._view):
                left = min(deadline - time.monotonic(), _LOOK_SECONDS)
                if left <= 0 or self.is_lost:
                    return False
                self._changed.wait(left)
        return True

    def wait_for_change(self, seconds: float) -> None:
        """Wait for the next look at the registry, but no longer than so long."""
        with self._changed:
            self._changed.wait(seconds)

    def propose(self, roster: Roster) -> None:
        """Begin a generation.  Call on the leader.

        Raises:
            LaunchError: another host has begun one of that number: it leads.
            RegistryLostError: the registry cannot be reached.
        """
        place = f"{_ROSTER}/{roster.number}"
        text = self._secret.sign(place, roster.to_json())
        if not self._registry.create(place, text) and self._registry.get([place]).get(place) != text:
            raise LaunchError(f"another host has begun generation {roster.number} of this job: it leads by now.")
        self._registry.put(_LATEST, str(roster.number))
        self._look()

    def report(self, number: int, end: JobEnd) -> None:
        """Say to the others how this host's ranks of a generation ended."""
        place = self._end_place(number, self.name)
        self._registry.put(place, self._secret.sign(place, end_to_json(end)))

    def conclude(self, verdict: JobVerdict) -> None:
        """Say to all hosts that the job has ended.  Call on the leader."""
        self._registry.put(_VERDICT, self._secret.sign(_VERDICT, asdict(verdict)))

    def _keep(self) -> None:
        beat_at = 0.0
        while not self._closing.wait(_LOOK_SECONDS):
            try:
                if time.monotonic() - beat_at >= BEAT_SECONDS:
                    beat_at = time.monotonic()
                    if not self._registry.beat():
                        self._lost = "the other hosts have given this one up: it gave no sign of life in time"
                    self._also_beat()
                self._look()
            except RegistryLostError as error:
                logger.debug("%s", error)  # `why_lost` says so once it lasts
            with self._changed:
                self._changed.notify_all()

    def _look(self) -> None:
        asked_at = time.monotonic()
        members = self._members()
        roster, text = self._roster(), self._registry.get([_VERDICT]).get(_VERDICT)
        verdict = self._opened(_VERDICT, text) if text != self._old_verdict else None
        ends = dict(self._view.ends) if roster is self._view.roster else {}
        if roster is not None:
            places = {self._end_place(roster.number, seat.member): seat.member for seat in roster.seats}
            for place, text in self._registry.get([place for place, who in places.items() if who not in ends]).items():
                if (content := self._opened(place, text)) is not None:
                    ends[places[place]] = end_of_json(content)
        view = JobView(
            members=members, roster=roster, ends=ends, verdict=None if verdict is None else JobVerdict(**verdict)
        )
        with self._changed:
            self._view, self._seen_at = view, asked_at
            self._changed.notify_all()

    def _members(self) -> dict[str, HostFacts]:
        members: dict[str, HostFacts] = {}
        for name, text in self._registry.members():
            content = self._opened(_HOST, text)
            if content is not None:
                members[name] = HostFacts(**content)
            elif name not in self._strangers:
                self._strangers.add(name)
                logger.warning("a host that does not know this job's secret has joined its registry; it is left out.")
        return members

    def _roster(self) -> Roster | None:
        latest = self._registry.get([_LATEST]).get(_LATEST, "")
        known = self._view.roster
        if not latest.isdecimal() or (known is not None and int(latest) <= known.number):
            return known
        place = f"{_ROSTER}/{int(latest)}"
        content = self._opened(place, self._registry.get([place]).get(place))
        return known if content is None else Roster.of_json(content)

    def _opened(self, place: str, text: str | None) -> dict[str, Any] | None:
        return None if text is None else self._secret.open(place, text)

    @staticmethod
    def _end_place(number: int, member: str) -> str:
        return f"{_END}/{number}/{member}"
