"""One generation on several hosts: the leader says who starts which ranks, all start theirs, and all hear how it ended.

As soon as the ranks of one host have failed, or the host is gone, the others end theirs: they would only wait.  The
leader collects what every host reports, and makes of it the end of one job, as of ranks on one host.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

from weft.errors import LaunchError
from weft.run.hosts.membership import JobVerdict, JobView, Membership
from weft.run.hosts.registry import LEASE_SECONDS, RegistryLostError
from weft.run.hosts.roster import HostFacts, Roster, Seat, in_order, merged, seats_of
from weft.run.hosts.torch_store import serve_store
from weft.run.launch.job_end import HOST_LOST, JobEnd, RankExit
from weft.run.launch.launcher import ForkServer, HangLimits, HostPart, run_function

_REPORT_SECONDS = 30.0
"""Time for a host that is there to report how its ranks ended, after those of another have: it only kills them."""
_FUNCTION = "weft.run.worker:run_rank"
"""All that one host can make another call in a training."""
_REACH_SECONDS = 10.0
_PAUSE_SECONDS = 0.1
_TELEMETRY = "telemetry"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRanks:
    """The ranks that one host is to start for a generation."""

    roster: Roster
    seat: Seat
    """Those of this host."""
    arguments: dict[str, Any]
    """What the leader says to all ranks."""
    fork_server: ForkServer | None
    signal_to_send: Callable[[], Any]
    is_over_elsewhere: Callable[[], bool]
    """Whether ranks of other hosts have ended, so that these cannot go on."""
    rings: Path | None

    @property
    def part(self) -> HostPart:
        """What the launcher must know of the other hosts."""
        return self.roster.part_of(self.seat)

    @property
    def hang_limits(self) -> HangLimits:
        return HangLimits(self.roster.hang_seconds, self.roster.collective_timeout_seconds)


StartRanks = Callable[[HostRanks], JobEnd]
"""Runs a host's ranks of a generation to their end.  Raises `LaunchError` where none could be started."""
Record = Callable[[str, bytes], AbstractContextManager[Path | None]]
"""Gives the folder in which a host's ranks of a generation record what they do, and sends that to the collector at an
address (`Roster.collector`), with the key of the job's telemetry; None: they do not record."""


@final
class HostCrew:
    """The hosts of a job as the leader uses them: `run` starts a generation on all that take part."""

    def __init__(
        self,
        membership: Membership,
        address: str,
        *,
        least: int,
        most: int,
        blocks: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`least` and `most`: hosts that take part.  Further ones wait for the place of one that is lost.  `blocks`:
        see `in_order`."""
        self.start: StartRanks = start_training
        """Starts the ranks of this host."""
        self._membership = membership
        self._address = address
        self._least, self._most, self._blocks = least, most, tuple(blocks)
        self._hosts: dict[str, HostFacts] = {}
        self._new: set[str] = set()
        """Hosts that take part in this generation for the first time."""
        self._roster: Roster | None = None
        """The newest generation that this host has begun."""
        self._gone: dict[str, str] = {}
        """Hosts that take part in no further generation, with the reason as the end of a sentence."""
        self.collector = ""
        """Where this host collects what ranks of the next generation record: see `Roster.collector`."""

    @property
    def listen(self) -> tuple[str, bytes]:
        """The address of this host on which the others may report, and the key that they know."""
        return self._address, self._membership.key(_TELEMETRY)

    @property
    def hosts(self) -> Mapping[str, HostFacts]:
        """The hosts that take part, by their names in the registry; the leader's is the first."""
        return self._hosts

    @property
    def num_devices(self) -> int:
        """Ranks that the hosts can have together."""
        return sum(facts.num_devices for facts in self._hosts.values())

    def choose(self) -> None:
        """Let those take part that are there, as many as are wanted."""
        before, present = self._hosts, self.present()
        self._hosts = in_order(dict(list(present.items())[: self._most]), self._blocks)
        self._new = set(self._hosts) - set(before) if before else set()

    def has_grown(self) -> bool:
        """Whether a host has come that would take part: ask while ranks run, and let them hand over if so."""
        return set(self._hosts) < set(list(self.present())[: self._most])

    def change_after(self, end: JobEnd, seconds: float) -> str:
        """Choose anew, and return a sentence that says who was lost, left or has come; empty where nothing has changed.
        Where too few are left, wait so long for others.

        Raises:
            LaunchError: too few hosts are there.
        """
        before = dict(self._hosts)
        self._leave_out_newcomer(end)
        if not self._membership.wait(lambda _: len(self.present()) >= self._least, seconds):
            self._refuse_if_lost()
            names = ", ".join(facts.host for facts in self.present().values())
            waited = "" if self._membership.is_stopping else f", and no other has come in {seconds:.0f} s"
            raise LaunchError(
                f"only {len(self.present())} of at least {self._least} hosts are there ({names}){waited}. Start Weft"
                " on another host by the same command, or permit fewer (--nodes).",
                status=os.EX_TEMPFAIL,
            )
        self.choose()
        out = {name: facts.host for name, facts in before.items() if name not in self._hosts}
        come = [facts.host for name, facts in self._hosts.items() if name not in before]
        sentences = [f"host {host} {self._gone.get(name, 'was lost')}" for name, host in out.items()]
        sentences += [f"host {host} has come" for host in come]
        return f"since {' and '.join(sentences)}" if sentences else ""

    def _leave_out_newcomer(self, end: JobEnd) -> None:
        """Leave out a host that fails where it has just come: the others could go on without it, and will."""
        made_steps = any(position.step > position.first_step for position in end.positions.values())
        if end.cause is None or made_steps or self._roster is None:
            return
        for seat in self._roster.seats:
            is_its = seat.first_rank <= end.cause.rank < seat.first_rank + seat.num_ranks
            if is_its and seat.member in self._new and len(self.present()) > self._least:
                self._gone[seat.member] = "failed at its start"

    def run(
        self,
        function: str,
        arguments: Mapping[str, Any],
        num_processes: int,
        *,
        threads_per_rank: int,
        fork_server: ForkServer | None,
        stopped_timeout_seconds: float,
        hang_limits: HangLimits,
        memory: Path | None,
        signal_to_send: Callable[[], Any],
        rings: Path | None,
    ) -> JobEnd:
        """Run a generation's ranks on all hosts to their end, as `weft.run.launch.launcher.run_function` does on one.

        Raises:
            LaunchError: this host no longer leads, or no ranks could be started.
        """
        self._refuse_if_lost()
        last = self._membership.view.roster
        store, port = serve_store(self._address)
        roster = Roster(
            number=1 if last is None else last.number + 1,
            seats=seats_of(self._hosts, num_processes),
            store=f"{self._address}:{port}",
            function=function,
            arguments=dict(arguments),
            threads_per_rank=threads_per_rank,
            stopped_timeout_seconds=stopped_timeout_seconds,
            hang_seconds=hang_limits.hang_seconds,
            collective_timeout_seconds=hang_limits.timeout_seconds,
            collector=self.collector if rings is not None else "",
        )
        roster = self._roster = self._membership.propose(roster)
        record: Record = lambda collector, key: nullcontext(rings)  # noqa: E731 - the collector reads them itself
        own = run_part(self._membership, roster, self.start, fork_server, signal_to_send, record)
        end = self._collect(roster, own)
        del store  # ranks have ended, and with them all that met here
        return end

    def conclude(self, status: int, text: str) -> None:
        """Say to the other hosts that the job has ended, and give them a moment to hear it."""
        roster = self._membership.view.roster
        number = 0 if roster is None else roster.number
        self._membership.conclude(JobVerdict(number=number, status=status, text=text))
        # Also where a signal has come: the store may end with this process, and the others must have read it by then.
        deadline = time.monotonic() + LEASE_SECONDS
        while not set(self._membership.view.members) <= {self._membership.name} and time.monotonic() < deadline:
            self._membership.wait_for_change(_PAUSE_SECONDS)

    def _collect(self, roster: Roster, own: JobEnd) -> JobEnd:
        """Wait until every host has reported, or is gone; `own` is this host's end.

        Raises:
            LeaderStoppedError: this host alone was told to stop, and the others go on without it.
        """
        wanted = {seat.member for seat in roster.seats}
        is_complete: Callable[[JobView], bool] = lambda view: wanted <= {*view.ends, *(wanted - {*view.members})}  # noqa: E731
        deadline = time.monotonic() + _REPORT_SECONDS
        while not is_complete(self._membership.view) and not self._membership.is_lost and time.monotonic() < deadline:
            self._membership.wait_for_change(
                _PAUSE_SECONDS
            )  # also where a signal has come: what was saved is known then
        self._refuse_if_lost()
        view = self._membership.view
        ends = {**view.ends, roster.seats[0].member: own}
        order = list(ends)
        for seat in roster.seats:
            if seat.member not in ends:
                ends[seat.member] = _lost(seat)
                order.append(seat.member)
        stopped = {member for member, each in ends.items() if signal.SIGTERM in each.signals}
        if stopped and len(self._hosts.keys() - stopped) >= self._least:
            # Only these hosts were told to stop: they have saved with all others, who go on without them.
            if roster.seats[0].member in stopped and own.cause is None:
                raise LeaderStoppedError(
                    "this host was told to stop, and has saved with the others, who go on.", status=75
                )
            self._gone.update((member, "has left") for member in stopped)
            ends.update((member, replace(ends[member], signals=())) for member in stopped)
        return merged(ends, order, roster.world_size)

    def present(self) -> dict[str, HostFacts]:
        """The hosts that may take part.  One that was started otherwise finds that out by itself, and ends."""
        own, members = self._membership.facts, self._membership.view.members
        return {name: facts for name, facts in members.items() if name not in self._gone and not facts.difference(own)}

    def _refuse_if_lost(self) -> None:
        if self._membership.is_lost:
            raise RegistryLostError(f"this host is on its own: {self._membership.why_lost}. Its ranks have ended.")


class LeaderStoppedError(LaunchError):
    """The leader was told to stop, and the others go on: it leaves without a verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """How following ended."""

    why: Literal["verdict", "leads", "lost", "stopped"]
    """The job is over; this host leads by now; it is on its own; or a signal has stopped it."""
    verdict: JobVerdict | None = None
    signal: signal.Signals | None = None
    """The signal that has stopped this host's ranks."""
    has_saved: bool = False
    """Whether this host's ranks have saved before they stopped."""
    has_run: bool = False
    """Whether this host has started ranks."""


def follow(
    membership: Membership,
    start: StartRanks,
    *,
    fork_server: ForkServer | None,
    may_lead: bool,
    record: Record,
) -> Followed:
    """Start this host's ranks of one generation after another, as the leader says.

    Args:
        start: starts the ranks of this host.
        record: records what this host's ranks do.
        may_lead: whether this host can lead.  Where it meets the others at the leader's store it cannot: it must look
            for them again.

    Raises:
        LaunchError: this host does not belong to the others.
    """
    done = 0
    while True:
        if membership.view.verdict is not None:
            return Followed(why="verdict", verdict=membership.view.verdict)
        if membership.is_lost:
            return Followed(why="lost", has_run=done > 0)
        if membership.is_stopping:
            return Followed(why="stopped")
        leader = next(iter(membership.view.members.values()), membership.facts)
        if problem := membership.facts.difference(leader):
            raise LaunchError(problem)
        roster = membership.view.roster
        if roster is None or roster.seat_of(membership.name) is None or roster.number <= done:
            if membership.is_leader:
                return Followed(why="leads" if may_lead else "lost", has_run=done > 0)
            membership.wait_for_change(0.5)
            continue
        done = roster.number
        end = run_part(membership, roster, start, fork_server, lambda: None, record)
        if end.signals:
            return Followed(why="stopped", signal=end.signals[0], has_saved=end.cause is None)


def start_training(ranks: HostRanks) -> JobEnd:
    """Run a host's ranks of a training to their end.

    Raises:
        LaunchError: the leader asks for something else than a training, or no ranks could be started.
    """
    roster = ranks.roster
    if roster.function != _FUNCTION:
        raise LaunchError(f"the leader asks this host to call {roster.function!r}, and only {_FUNCTION!r} is called.")
    return run_function(
        roster.function,
        ranks.arguments,
        ranks.seat.num_ranks,
        threads_per_rank=roster.threads_per_rank,
        fork_server=ranks.fork_server,
        stopped_timeout_seconds=roster.stopped_timeout_seconds,
        hang_limits=ranks.hang_limits,
        signal_to_send=ranks.signal_to_send,
        part=ranks.part,
        is_over_elsewhere=ranks.is_over_elsewhere,
        rings=ranks.rings,
    )


def run_part(
    membership: Membership,
    roster: Roster,
    start: StartRanks,
    fork_server: ForkServer | None,
    signal_to_send: Callable[[], Any],
    record: Record,
) -> JobEnd:
    """Run this host's ranks of a generation to their end, and report it to the others."""
    seat = roster.seat_of(membership.name)
    assert seat is not None, "a host that has none only waits"

    def is_over_elsewhere() -> bool:
        """Whether the ranks of this generation cannot go on."""
        view = membership.view
        if membership.is_lost or view.roster is None or view.roster.number != roster.number:
            return True
        failed = any(end.cause is not None for member, end in view.ends.items() if member != membership.name)
        # A host that has reported may leave: its ranks have ended well, and these are about to.
        return failed or any(each.member not in {*view.members, *view.ends} for each in roster.seats)

    try:
        with record(roster.collector, membership.key(_TELEMETRY)) as rings:
            ranks = HostRanks(
                roster=roster,
                seat=seat,
                arguments=dict(roster.arguments),
                # A fork server that was killed with its ranks is replaced: without one, the job starts its own.
                fork_server=fork_server if fork_server is not None and fork_server.is_alive else None,
                signal_to_send=signal_to_send,
                is_over_elsewhere=is_over_elsewhere,
                rings=rings,
            )
            end = start(ranks)
    except LaunchError as error:
        end = _not_started(seat, error)
    deadline = time.monotonic() + _REACH_SECONDS
    while not membership.is_lost:
        try:
            membership.report(roster.number, end)
            break
        except RegistryLostError:
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_SECONDS)
    return end


def _lost(seat: Seat) -> JobEnd:
    """The end of a host's ranks that nobody can report any more."""
    ranks = f"rank {seat.first_rank}" if seat.num_ranks == 1 else f"ranks {seat.first_rank} to {_last(seat)}"
    cause = RankExit(
        rank=seat.first_rank,
        host=seat.host,
        when=time.monotonic(),
        error=HOST_LOST,
        message=f"host {seat.host} was lost with {ranks}: it gave no sign of life for {LEASE_SECONDS:.0f} s",
        status=1,
    )
    return JobEnd(num_processes=seat.num_ranks, outcomes={}, cause=cause, has_failed_rank=True)


def _not_started(seat: Seat, error: LaunchError) -> JobEnd:
    cause = RankExit(
        rank=seat.first_rank,
        host=socket.gethostname(),
        when=time.monotonic(),
        error=type(error).__name__,
        message=str(error),
        is_weft_error=True,
        weft_status=error.status,
        status=1,
    )
    return JobEnd(num_processes=seat.num_ranks, outcomes={}, cause=cause, has_failed_rank=True)


def _last(seat: Seat) -> int:
    return seat.first_rank + seat.num_ranks - 1
