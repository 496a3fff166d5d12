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
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, final

from weft.config.document import typed
from weft.run.hosts.registry import BEAT_SECONDS, FENCE_SECONDS, LEASE_SECONDS, Registry, RegistryLostError
from weft.run.hosts.roster import HostFacts, Roster, end_of_json, end_to_json
from weft.run.hosts.signed import JobSecret
from weft.run.launch.job_end import JobEnd

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
"""Interval at which the registry is read; a read takes under 1 ms on one network."""
_MESSAGE_LETTERS = 20_000
"""Letters of an error that the other hosts are told."""
_DIGITS = 15
"""Digits of the largest number of a generation that is read; whoever reaches the registry may write longer ones."""
_ROSTER, _LATEST, _VERDICT, _END, _HOST = "roster", "latest", "verdict", "end", "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """How the whole job ended; every host then ends, too."""

    number: int
    """Number of the last generation; that of a later one makes it void."""
    status: int
    """Exit status of the leader's command."""
    text: str
    """What the other hosts say."""
    mark: str = field(default_factory=lambda: os.urandom(8).hex())
    """Tells it from the verdict on an earlier job in the same folder, which had as many generations."""


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
        self, registry: Registry, secret: JobSecret, facts: HostFacts, *, is_stopping: Callable[[], bool]
    ) -> None:
        """`is_stopping` says whether a signal has come to this process: then no wait goes on."""
        self._registry = registry
        self._secret = secret
        self.facts = facts
        self._is_stopping = is_stopping
        self.name = ""
        """This host's name in the registry."""
        self._changed = threading.Condition()
        self._view = JobView()
        self._looking = threading.Lock()
        """Held by the thread that looks: a view never gives way to an older one."""
        self._seen_at = self._beat_at = time.monotonic()
        self._lost = ""
        self._old_verdict: str | None = None
        """JobVerdict on an earlier job, which this one goes on with."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="weft-membership", daemon=True)
        self._strangers: set[str] = set()

    def __enter__(self) -> Self:
        self._old_verdict = self._registry.get([_VERDICT]).get(_VERDICT)
        self.name = self._registry.join(lambda name: self._secret.sign(f"{_HOST}/{name}", asdict(self.facts)))
        self._beat_at = time.monotonic()
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

    def key(self, purpose: str) -> bytes:
        """The key of this meeting for connections that serve one purpose."""
        return self._secret.key(purpose)

    @property
    def view(self) -> JobView:
        """The job as it was seen last."""
        return self._view

    @property
    def is_lost(self) -> bool:
        """Whether this host is on its own: it could not reach the registry, or was taken off the list.  It stays so:
        the others may have gone on by now, so it must join again."""
        return bool(self.why_lost)

    @property
    def why_lost(self) -> str:
        """Why this host is on its own; empty: it is not."""
        # The registry counts from the last sign of life that it got, and this host from when it sent that.
        silent = time.monotonic() - min(self._seen_at, self._beat_at)
        if not self._lost and silent >= FENCE_SECONDS:
            self._lost = f"the registry of the job has not answered for {silent:.1f} s"
        return self._lost

    @property
    def is_stopping(self) -> bool:
        """Whether a signal has come to this process."""
        return self._is_stopping()

    @property
    def is_leader(self) -> bool:
        """Whether this host joined first of those that are there."""
        return next(iter(self._view.members), None) == self.name

    def wait(self, until: Callable[[JobView], bool], seconds: float) -> bool:
        """Wait until the view is as wanted; False: it was not in time, a signal has come, or this host is lost."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not until(self._view):
                left = min(deadline - time.monotonic(), _LOOK_SECONDS)
                if left <= 0 or self.is_lost or self.is_stopping:
                    return False
                self._changed.wait(left)
        return True

    def wait_for_change(self, seconds: float) -> None:
        """Wait for the next look at the registry, but no longer than so long."""
        with self._changed:
            self._changed.wait(seconds)

    def propose(self, roster: Roster) -> Roster:
        """Begin a generation.  Call on the leader.  Returns it with its number, which is higher where a leader that is
        gone has begun one and told nobody.

        Raises:
            RegistryLostError: another host leads by now, or the registry cannot be reached.
        """
        while True:
            place = f"{_ROSTER}/{roster.number}"
            text = self._secret.sign(place, roster.to_json())
            # The first to create the key has the number; the answer to a request that was carried out may be lost.
            if self._registry.create(place, text) or (there := self._registry.get([place]).get(place)) == text:
                self._registry.put(_LATEST, str(roster.number))
                self._look()
                return roster
            self._look()
            content = self._opened(place, there)
            leader = Roster.of_json(content).seats[0].member if content is not None else ""
            if leader in self._view.members:
                raise RegistryLostError(f"another host has begun generation {roster.number}: it leads by now.")
            roster = replace(roster, number=roster.number + 1)

    def report(self, number: int, end: JobEnd) -> None:
        """Say to the others how this host's ranks of a generation ended.  What the ranks return stays on this host: it
        may be long, and only that of rank 0 is used, by the leader."""
        outcomes = {
            rank: None if each is None else replace(each, value=None, message=each.message[:_MESSAGE_LETTERS])
            for rank, each in end.outcomes.items()
        }
        cause = None if end.cause is None else replace(end.cause, message=end.cause.message[:_MESSAGE_LETTERS])
        end = replace(end, outcomes=outcomes, cause=cause)
        place = self._end_place(number, self.name)
        self._registry.put(place, self._secret.sign(place, end_to_json(end)))

    def conclude(self, verdict: JobVerdict) -> None:
        """Say to all hosts that the job has ended.  Call on the leader, which must not be lost."""
        self._registry.put(_VERDICT, self._secret.sign(_VERDICT, asdict(verdict)))

    def _keep(self) -> None:
        beat_at = 0.0
        while not self._closing.wait(_LOOK_SECONDS):
            try:
                if time.monotonic() - beat_at >= BEAT_SECONDS:
                    beat_at = time.monotonic()
                    if not self._registry.beat():
                        self._lost = "the other hosts have given this one up: it gave no sign of life in time"
                    self._beat_at = beat_at
                self._look()
            except RegistryLostError as error:
                logger.debug("%s", error)  # `why_lost` says so once it lasts
            except Exception:
                # Whatever stands in the registry must not end this thread: the host would be lost with it.
                logger.exception("the registry of the job cannot be read")
            with self._changed:
                self._changed.notify_all()

    def _look(self) -> None:
        with self._looking:
            self._look_once()

    def _look_once(self) -> None:
        asked_at = time.monotonic()
        members = self._members()
        roster, text = self._roster(), self._registry.get([_VERDICT]).get(_VERDICT)
        content = self._opened(_VERDICT, text) if text != self._old_verdict else None
        verdict = None if content is None else JobVerdict(**content)
        if verdict is not None and verdict.number != (0 if roster is None else roster.number):
            verdict = None  # on an earlier generation: somebody has put it there again
        ends = dict(self._view.ends) if roster is self._view.roster else {}
        if roster is not None:
            places = {self._end_place(roster.number, seat.member): seat.member for seat in roster.seats}
            for place, text in self._registry.get([place for place, who in places.items() if who not in ends]).items():
                if (content := self._opened(place, text)) is not None:
                    ends[places[place]] = end_of_json(content)
        view = JobView(members=members, roster=roster, ends=ends, verdict=verdict)
        with self._changed:
            self._view, self._seen_at = view, asked_at
            self._changed.notify_all()

    def _members(self) -> dict[str, HostFacts]:
        members: dict[str, HostFacts] = {}
        for name, text in self._registry.members():
            content = self._opened(f"{_HOST}/{name}", text)
            try:
                if content is not None:
                    members[name] = typed(HostFacts, content)
                    continue
                problem = "that does not know this job's secret"
            except (KeyError, TypeError, ValueError):
                problem = "with another version of Weft"
            if name not in self._strangers:
                self._strangers.add(name)
                logger.warning("a host %s has joined the job's registry; it is left out.", problem)
        return members

    def _roster(self) -> Roster | None:
        latest = self._registry.get([_LATEST]).get(_LATEST, "")
        known = self._view.roster
        if not latest.isdecimal() or len(latest) > _DIGITS or (known is not None and int(latest) <= known.number):
            return known
        place = f"{_ROSTER}/{int(latest)}"
        content = self._opened(place, self._registry.get([place]).get(place))
        return known if content is None else Roster.of_json(content)

    def _opened(self, place: str, text: str | None) -> dict[str, Any] | None:
        return None if text is None else self._secret.open(place, text)

    @staticmethod
    def _end_place(number: int, member: str) -> str:
        return f"{_END}/{number}/{member}"
