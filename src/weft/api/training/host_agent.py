"""This host's part in a job on several: it follows, or leads, until the job is over.  What the job does is its work."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from weft.config.cluster import Cluster
from weft.errors import LaunchError, WeftError
from weft.events import RunFolder
from weft.run.checkpoint import newest_saved_step
from weft.run.hosts.crew import HostCrew, HostRanks, LeaderStoppedError, follow
from weft.run.hosts.meeting import FOLDER, Meeting, open_meeting
from weft.run.hosts.membership import JobVerdict, Membership
from weft.run.hosts.registry import RegistryLostError
from weft.run.hosts.roster import HostFacts
from weft.run.hosts.signed import SECRET, JobSecret
from weft.run.launch.job_end import JobEnd
from weft.run.launch.launcher import ForkServer
from weft.run.places.contract import GangBlock, read_nodes
from weft.run.places.placement import placement_lines
from weft.run.supervise import SupervisorSignals
from weft.watch.host_recorder import record_host

_SETTLE_SECONDS = 1.0
"""Time that further hosts get after the least number is there: one command starts them together."""
_FIRST_MEETING_SECONDS = 20.0
"""Time to reach the registry at the beginning, when its address may be wrong.  Later on it is known to be right."""
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsRequest:
    """Hosts of a job, as its user asks for them: the same on all."""

    least: int
    most: int
    rendezvous: str = FOLDER
    """`folder`: the host that gets the run's folder serves a store.  `etcd://host:port,…`: etcd, which outlives any."""
    network: str | None = None
    """Network on which hosts reach one another, as `10.0.0.0/24`; None: each has one address only."""
    wait_seconds: float = 300.0
    """Time to wait for hosts at the beginning."""
    replacement_seconds: float = 300.0
    """Time to wait for others where too few are left."""
    index: int = 0
    """This host's number by its place; hosts that lie in the same unit take their ranks in this order."""
    topology: tuple[str, ...] = ()
    """Where this host lies, from the outside in, as its place names it."""
    cluster: Cluster | None = None
    """What the hosts are and how they are joined, for the planner; None: all are like this one, on 10 Gbit/s."""
    blocks: tuple[GangBlock, ...] = ()
    """Hosts that should lie together, as the place was asked."""

    @classmethod
    def of_nodes(
        cls, nodes: int | str, *, rendezvous: str = FOLDER, network: str | None = None, wait_seconds: float = 300.0
    ) -> HostsRequest:
        """Read `4`, or `2..4` where hosts may be lost and join.

        Raises:
            LaunchError: it is neither.
        """
        least, most = read_nodes(nodes)
        return cls(
            least=least,
            most=most,
            rendezvous=rendezvous,
            network=network,
            wait_seconds=wait_seconds,
        )


class HostWork(Protocol[R]):
    """What the hosts of a job do together."""

    def prepare(self) -> None:
        """Make ready what this host needs to start ranks.  Called once, before it joins: then others wait for it."""
        ...

    def start(self, ranks: HostRanks) -> JobEnd:
        """Run this host's ranks of a generation to their end, as another host says that leads.

        Raises:
            WeftError: none could be started.
        """
        ...

    def lead(self, crew: HostCrew, meeting: Meeting, signals: SupervisorSignals, *, has_run: bool) -> R:
        """Lead the hosts to the end of the job.  `has_run`: whether this host has started ranks before.

        Raises:
            WeftError: it has failed.
        """
        ...

    def told(self, result: R) -> tuple[int, str]:
        """The status and the sentence by which the other hosts are told how the job ended."""
        ...


@dataclass(slots=True, kw_only=True)
class HostAgent(Generic[R]):
    """This host's part in one job."""

    work: HostWork[R]
    request: HostsRequest
    run: RunFolder
    facts: HostFacts
    quiet: bool
    fork_server: ForkServer | None

    def run_to_end(self) -> R | None:
        """Follow or lead until the job is over.  Returns what came of it where this host led at the end; else None.

        Raises:
            WeftError: what was wrong.  Status 75: the job, or this host, was stopped, and can be started again.
        """
        secret = self._open_folder()
        self.work.prepare()
        seconds, wait_seconds = _FIRST_MEETING_SECONDS, self.request.wait_seconds
        has_met = has_run = False
        with SupervisorSignals() as signals:
            while True:
                with open_meeting(
                    self.request.rendezvous,
                    self.run.path,
                    secret,
                    self.facts,
                    seconds=seconds,
                    is_again=has_met,
                    is_stopping=signals.stopping.is_set,
                    log=self._say,
                ) as meeting:
                    has_met = True
                    followed = follow(
                        meeting.membership,
                        self.work.start,
                        fork_server=self.fork_server,
                        may_lead=meeting.may_lead,
                        record=record_host,
                    )
                    has_run = has_run or followed.has_run
                    if followed.verdict is not None:
                        return self._conclude(followed.verdict)
                    if followed.why == "stopped":
                        raise stopped(followed.signal or signals.number, has_saved=followed.has_saved)
                    if followed.why == "leads":
                        try:
                            return self._lead(meeting, signals, wait_seconds, has_run=has_run)
                        except RegistryLostError as error:
                            self._say(f"note      {error}")
                if signals.stopping.is_set():
                    raise stopped(signals.number, has_saved=False)
                seconds = wait_seconds = self.request.replacement_seconds
                self._say("note      this host looks for the others again")

    def _open_folder(self) -> JobSecret:
        """Make the run's folder, and return the job's secret, which lies in it.

        Raises:
            LaunchError: the folder is no run's, or cannot be made.
        """
        path = self.run.path
        is_run = (path / SECRET).exists() or newest_saved_step(self.run.checkpoints) > 0
        if path.is_dir() and any(path.iterdir()) and not is_run:
            raise LaunchError(f"{path} is there already, not empty, and no run's folder. Give a new folder.")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"the run folder {path} cannot be made: {error.strerror}.") from None
        return JobSecret.of_folder(path)

    def _conclude(self, verdict: JobVerdict) -> None:
        if verdict.status:
            raise LaunchError(verdict.text, status=verdict.status)
        self._say(verdict.text)

    def _lead(self, meeting: Meeting, signals: SupervisorSignals, wait_seconds: float, *, has_run: bool) -> R:
        """Lead the job to its end, and tell the others how it ended."""
        if line := meeting.lead():
            self._say(f"note      {line}")
        crew = HostCrew(
            meeting.membership,
            self.facts.address,
            least=self.request.least,
            most=self.request.most,
            blocks=[(block.num_nodes, block.level) for block in self.request.blocks],
        )
        try:
            self._gather(crew, meeting.membership, wait_seconds)
            if signals.stopping.is_set():  # the others, if they are not told so, too, go on
                raise LeaderStoppedError(str(stopped(signals.number, has_saved=False)), status=os.EX_TEMPFAIL)
            result = self.work.lead(crew, meeting, signals, has_run=has_run)
        except (RegistryLostError, LeaderStoppedError):
            raise
        except WeftError as error:
            if not meeting.still_leads:  # others may go on: what went wrong here says nothing of them
                raise RegistryLostError(f"this host leads no longer: {error}") from error
            crew.conclude(error.status, f"host {self.facts.host}, which leads, says: {error}")
            raise
        status, text = self.work.told(result)
        crew.conclude(status, f"{text} (host {self.facts.host} has led)")
        return result

    def _gather(self, crew: HostCrew, membership: Membership, seconds: float) -> None:
        """Wait so long until enough hosts are there, and choose them.

        Raises:
            LaunchError: too few have come in time.
        """
        wanted, least = self.request.most, self.request.least
        if len(crew.present()) < least:
            self._say(f"hosts     {_names(crew.present())}; at least {least} are wanted, so this one waits for more")
        enough = membership.wait(lambda _: len(crew.present()) >= least, seconds)
        if not enough and not membership.is_stopping:
            raise LaunchError(
                f"at least {least} hosts are wanted, and {_names(crew.present())} have come in"
                f" {seconds:.0f} s. Start Weft on the others by the same command, or permit fewer"
                " (--nodes).",
                status=os.EX_TEMPFAIL,
            )
        if len(crew.present()) < wanted:
            membership.wait(lambda _: len(crew.present()) >= wanted, _SETTLE_SECONDS)
        crew.choose()
        self._say(f"hosts     {_names(crew.hosts)}")
        for line in placement_lines(self.request.blocks, [facts.topology for facts in crew.hosts.values()]):
            self._say(line)

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)


def stopped(number: signal.Signals | None, *, has_saved: bool) -> LaunchError:
    """The error of a host that a signal has stopped."""
    number = number or signal.SIGTERM
    status = 128 + number if number == signal.SIGINT else os.EX_TEMPFAIL
    saved = ", and has saved with the others." if has_saved else " before a step of its own could be saved."
    return LaunchError(f"this host was stopped by {number.name}{saved}", status=status)


def _names(hosts: Mapping[str, HostFacts]) -> str:
    names = [facts.host for facts in hosts.values()]
    return f"{len(names)} host{'s' if len(names) != 1 else ''}: {', '.join(names)}"
