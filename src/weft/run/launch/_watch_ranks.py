"""Notices the death of a rank: the launcher's view of a running job, from the first rank's start to the last one's end.

The parent of the ranks (`_fork_server_main`) reaps them and writes a line into a pipe for each: its exit code and when
it ended.  The launcher reads that pipe here.  After the first failure the other ranks get a moment to say what they
know, and are then ended.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import BinaryIO

from weft.events.progress import Position
from weft.run.launch._fork_server_main import TERMINATE
from weft.run.launch._hang import HangWatch
from weft.run.launch._job import RankExit
from weft.run.launch._report import is_timeout
from weft.run.launch._stopped import POLL_SECONDS, StoppedProcesses
from weft.run.launch._straggler import StragglerWatch

_LEAST_WAIT_SECONDS = 0.01
_GRACE_SECONDS = 1.0
"""Time that the other ranks get to notice a failure by themselves, before the launcher ends them."""


@dataclass(slots=True)
class RunningJob:
    """The state of a running job, as the launcher knows it."""

    commands: BinaryIO
    """Pipe to the ranks' parent: one byte for each command."""
    num_processes: int
    stopped: StoppedProcesses
    codes: dict[int, int] = field(default_factory=dict[int, int])
    """Rank → exit code; negative: the signal that killed it."""
    ended_at: dict[int, float] = field(default_factory=dict[int, float])
    """Rank → when it ended, in monotonic seconds of this host."""
    signals: list[signal.Signals] = field(default_factory=list[signal.Signals])
    """SIGINT and SIGTERM that this process got, in their order."""
    stopped_cause: str | None = None
    """Report of what was stopped when the first rank failed, or for too long."""
    stopped_rank: int = 0
    """Rank of the stopped process in that report."""
    first_rank: int = 0
    """Number of this host's first rank in the whole job."""
    is_over_elsewhere: Callable[[], bool] = lambda: False
    """Asked at every look: whether ranks of another host have ended, so that these cannot go on."""
    was_ended: bool = False
    """Whether this job was ended because it was over elsewhere."""
    poll_seconds: float = POLL_SECONDS
    """Interval of the looks."""
    hang: HangWatch | None = None
    """Looks for a training whose step makes no progress, where that is asked for."""
    stragglers: StragglerWatch | None = None
    """Looks for ranks that are slower than others, where that is asked for."""
    hanging: RankExit | None = None
    """The rank that hangs, once it is known."""
    read_exit: Callable[[int], RankExit | None] = lambda rank: None
    """Returns what a rank that has ended has reported."""
    is_blaming: bool = False
    """Whether the only failures so far are collectives that timed out, so that the rank is looked for which they waited
    for."""
    parent_status: int | None = None
    """Status of the process that started the ranks, where that ended before they did."""
    signal_to_send: Callable[[], signal.Signals | None] = lambda: None
    """Asked twice a second: a signal that the ranks shall get now, or None."""
    kills_survivors: Callable[[], bool] = lambda: False
    """Asked when a signal has killed a rank: whether the others are killed at once, because the job starts again from
    what is saved, and nothing that they could still say matters."""
    positions: dict[int, Position] = field(default_factory=dict[int, Position])
    """Rank → its position in the training when the job had ended."""

    def receive(self, line: bytes) -> None:
        """Take a line of the ranks' parent: `rank pid` of a new process, or `rank code time` of a rank that ended."""
        rank, *rest = line.split()
        if len(rest) == 1:
            self.stopped.started(int(rank), int(rest[0]))
            return
        self.stopped.ended(int(rank))
        self.codes[int(rank)], self.ended_at[int(rank)] = int(rest[0]), float(rest[1])

    def record_cause(self) -> None:
        """Remember what is stopped now, at the first failure."""
        if self.stopped_cause is None and (cause := self.stopped.cause()) is not None:
            self.stopped_cause, self.stopped_rank = cause, self.stopped.rank_of_cause()
        failed = [self.read_exit(rank) for rank, code in self.codes.items() if code]
        if self.hang is not None and self.hanging is None and failed and all(one and is_timeout(one) for one in failed):
            self.is_blaming = True
            self.hang.blame()

    def looks_further(self) -> bool:
        """Look for the rank that the others have waited for in vain; return whether to ask again a moment later."""
        if not self.is_blaming or self.hanging is not None or not self.alive:
            return False
        assert self.hang is not None
        if self.hang.needs_time(self.alive):
            return True
        self.hanging = self.hang.missing_rank(self.alive)
        self.is_blaming = self.hanging is not None
        return False

    @property
    def alive(self) -> list[int]:
        """Ranks of this host that have not ended."""
        own = range(self.first_rank, self.first_rank + self.num_processes)
        return [rank for rank in own if rank not in self.codes]

    def poll(self) -> None:
        """Look for ranks that are stopped, and for one that hangs, which ends the job at once."""
        self.stopped.poll()
        if self.stragglers is not None:
            self.stragglers.poll()
        if (number := self.signal_to_send()) is not None:
            self.send_command(number)
        if self.hang is not None and self.hanging is None and (hanging := self.hang.poll()) is not None:
            self.hanging = hanging
            self.send_command(signal.SIGKILL)  # it would not notice a kinder one, and the others wait for it

    @property
    def is_over(self) -> bool:
        """Whether the ranks that are left can be killed without losing anything."""
        if not self.was_ended and len(self.codes) < self.num_processes and self.is_over_elsewhere():
            self.was_ended = True
        return self.was_ended or (any(code < 0 for code in self.codes.values()) and self.kills_survivors())

    def forward_signal(self, number: int, _frame: object = None) -> None:
        """Pass a signal to every rank.  A further SIGINT kills: somebody at the terminal wants an end.  A further
        SIGTERM does not: job engines send it twice, and the ranks may be saving."""
        self.signals.append(signal.Signals(number))
        # The first signal lets ranks finish their step and save.
        if len(self.signals) == 1:
            self.send_command(number)
        elif number == signal.SIGINT:
            self.send_command(signal.SIGKILL)
        # A signal stays pending in a stopped process; SIGCONT lets it be handled.
        self.send_command(signal.SIGCONT)

    def send_command(self, number: int) -> None:
        """Send the number of a signal, or `TERMINATE`, to the ranks' parent, which alone may signal the ranks: it has
        not reaped them yet, so their pids cannot belong to other processes."""
        if not self.commands.closed:
            with contextlib.suppress(BrokenPipeError):  # the ranks' parent has just ended: nobody is left to obey
                self.commands.write(bytes([number]))


@contextlib.contextmanager
def forwarding_signals(job: RunningJob) -> Generator[None]:
    """Pass SIGINT and SIGTERM on while ranks run; outside the main thread Python allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Ranks run in a session of their own, so a terminal's Ctrl-C reaches this process alone and is passed on once.
    before = {number: signal.signal(number, job.forward_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch_ranks(job: RunningJob, events: int) -> None:
    """Read which rank ended how, until all have or the fork server is gone; after a failure, end the others."""
    deadline: float | None = None
    is_terminating = False
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(events, selectors.EVENT_READ)
        while len(job.codes) < job.num_processes:
            # The pipe wakes this process at once when a rank ends.  A stopped rank writes nothing, so it is looked for
            # by polling in between.
            left = job.poll_seconds if deadline is None else deadline - time.monotonic()
            wait = max(_LEAST_WAIT_SECONDS, min(job.poll_seconds, left))
            if selector.select(wait):
                data = os.read(events, 65536)
                if not data:  # the fork server and the ranks' parent are gone; the caller finds exits missing
                    return
                # A read may end inside of a line: what follows the last newline waits for the next read.
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    job.receive(line)
            elif deadline is not None and time.monotonic() >= deadline and not job.looks_further():
                # Sent once.  The parent escalates to SIGKILL by itself, so this loop only waits for the ends.  A rank
                # that hangs would not notice anything kinder.
                # Ranks that start again anyway need no time, either: they would only say that they were asked to stop.
                # Where none has failed, and one is stopped by a signal, they still finish their step and save.
                is_useless = job.is_blaming or (any(job.codes.values()) and job.kills_survivors())
                job.send_command(signal.SIGKILL if is_useless else TERMINATE)
                deadline, is_terminating = None, True
            elif not is_terminating:
                job.poll()
            has_failed = any(job.codes.values()) or job.hanging is not None
            if job.is_over and not is_terminating:
                job.send_command(signal.SIGKILL)
                is_terminating = True
            # The other ranks get a moment: another rank may have failed before this one and not have been reaped yet,
            # and a rank that fails by itself reports more than one that was ended.  A job that waits for a stopped
            # process has had its time already.
            if deadline is None and not is_terminating and (has_failed or job.stopped.is_timed_out):
                job.record_cause()
                deadline = time.monotonic() + (_GRACE_SECONDS if has_failed else 0.0)
