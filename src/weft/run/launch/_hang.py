"""Ranks whose step makes no progress: found by the launcher, which reads where they are and asks for their stacks.

A slow step and one that hangs look alike from outside.  So a step that takes too long makes a suspicion only: the
launcher then looks twice, a second apart, at what the ranks do.  Those that wait inside of a collective are not to
blame.  Of the others one hangs if its stack is the same both times and its process has computed nothing in between
(a lock, a sleep, a read that never ends).  One that computes may be compiling, or just be slow: it gets the time that
collectives wait.

Where the others' collectives time out first (before the loop, behind it, in a save), they only know that a rank has not
come.  Then the launcher looks at those that have not failed: one that is in no collective is the one they waited for.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.events.progress import Position, ProgressBoard
from weft.process import children_of, cpu_seconds_of, is_stopped
from weft.run.launch._job import RankExit
from weft.run.launch._rank_info import stacks_path
from weft.run.launch.job_end import HANG

LEAST_SECONDS = 5.0
"""Least time without progress that makes a suspicion, where the recipe does not say."""
_TIMES_LONGEST = 3.0
_FIRST_STEPS = 5
"""Finished steps of a generation before steps are compared with one another: the first compile and warm up."""
_KEPT_STEPS = 1_000
_LEAST_START_SECONDS = 2.0
"""Least time that a start may take before a rank is looked at: it must have come so far that it can answer."""
_LONGEST_PAUSE_SECONDS = 3.0
"""Time between two looks above which this process has not run either."""
_BETWEEN_LOOKS_SECONDS = 1.0
_BLAME_LOOKS_SECONDS = 0.4
_LONGEST_ANSWER_SECONDS = 2.0
"""Time that a rank gets to write its stacks on a busy machine."""
_IDLE_SHARE = 0.05
"""Share of a core below which a process counts as idle between two looks."""
_UNEVEN_PHASES = ("data_wait", "checkpoint", "evaluation", "other")
"""Phases whose time says nothing about that of the next: they get the time that collectives wait."""
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_WAITING_FILES = ("/torch/distributed/", "/weft/comm/")
_INNERMOST = 6
_SHOWN_FRAMES = 4


@dataclass(frozen=True, slots=True)
class HangLimits:
    """Limits of the time that a step may make no progress."""

    hang_seconds: float | None
    """The recipe's `run.on_failure.hang_seconds`: then a rank that computes hangs, too.  None: by the steps so far."""
    timeout_seconds: float
    """Seconds that collectives wait (the plan's `compute.collective_timeout_seconds`)."""
    peers: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks that have equally much to do, among which stragglers are looked for."""


@dataclass(frozen=True, slots=True)
class _Look:
    """Stacks and processor times of the ranks at one moment."""

    at: float
    cpu_seconds: dict[int, float]
    stacks: dict[int, str]


class HangWatch:
    """Watches the ranks of one job.  Call `poll` twice a second; it returns the rank that hangs, once there is one."""

    def __init__(
        self,
        board: ProgressBoard,
        folder: Path,
        limits: HangLimits,
        ask_for_stacks: Callable[[], object],
        first_rank: int = 0,
        pids: Mapping[int, int] | None = None,
    ) -> None:
        """`folder` is where ranks write their stacks when `ask_for_stacks` is called (`stacks_path`).  `first_rank` is
        that of this host, whose board counts its own ranks from 0.  `pids` are the processes of the ranks, as far as
        they are known before these write them on the board."""
        self._first_rank = first_rank
        self._board = board
        self._folder = folder
        self._limits = limits
        self._ask_for_stacks = ask_for_stacks
        self._step = -1
        """Finished steps of the rank that has finished fewest."""
        self._advanced_at = time.monotonic()
        """Monotonic time at which it finished the last of them, or left a phase whose time says nothing."""
        self._is_uneven = False
        self._moves = 0
        self._polled_at = time.monotonic()
        self._num_steps = 0
        self._step_seconds: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._first_look: _Look | None = None
        self._second_look: _Look | None = None
        self._asked_at: float | None = None
        self._pids = {} if pids is None else pids
        self._begun = -1
        """Marks of how far ranks have come that start: they are there, write on the board, are in their loops."""
        self._is_over = False
        self._is_blaming = False

    def poll(self) -> RankExit | None:
        """Read where the ranks are, and judge."""
        now = time.monotonic()
        if self._is_blaming:
            return None
        if now - self._polled_at > _LONGEST_PAUSE_SECONDS:
            # This process did not run either: the machine was suspended, or the job's control group frozen.
            self._advanced_at += now - self._polled_at
        self._polled_at = now
        positions = self._positions()
        self._note_steps(positions, now)
        stalled = now - self._advanced_at
        limit = self._limit(positions)
        if stalled < limit:
            self._first_look = self._asked_at = None
            return None
        if self._asked_at is None:
            self._ask(now)
            return None
        return self._compare(positions, now, stalled)

    def blame(self) -> None:
        """Collectives of some rank have timed out: let the others write what they do.  Ask `needs_time` from now on,
        and then `missing_rank`."""
        self._is_blaming, self._first_look = True, None
        self._ask(time.monotonic())

    def needs_time(self, alive: Collection[int]) -> bool:
        """Look at the ranks that have not failed, where they have written their stacks; return whether they must be
        looked at once more."""
        assert self._asked_at is not None
        waited = time.monotonic() - self._asked_at
        if waited < _BLAME_LOOKS_SECONDS:
            return True
        look = self._take_look(self._positions(), time.monotonic())
        if waited < _LONGEST_ANSWER_SECONDS and not all(look.stacks.get(rank) for rank in self._own(alive)):
            return True
        if self._first_look is None:
            self._first_look = look
            self._ask(time.monotonic())
            return True
        self._second_look = look
        return False

    def missing_rank(self, alive: Collection[int]) -> RankExit | None:
        """The rank, among those that have not failed, that the others have waited for in vain; None where all of these
        wait in collectives, too."""
        before, look, positions = self._first_look, self._second_look, self._positions()
        if before is None or look is None:
            return None
        busy = [rank for rank in self._own(alive) if not is_stopped(self._pid(rank, positions[rank]))]
        busy = [rank for rank in busy if all(_is_elsewhere(one.stacks.get(rank, "")) for one in (before, look))]
        if not busy:
            return None
        idle = [rank for rank in busy if self._is_idle(rank, before, look)]
        rank = (idle or busy)[0]
        why = f"the other ranks have waited for it in vain, while it was {positions[rank]}"
        return self._exit(rank, look, f"{why}. It {_does(rank in idle)}")

    def _own(self, ranks: Collection[int]) -> list[int]:
        """Ranks of the world as this host's board counts them."""
        return [rank - self._first_rank for rank in ranks]

    def _positions(self) -> list[Position]:
        return [self._board.position(rank) for rank in range(self._board.num_ranks)]

    def _note_steps(self, positions: list[Position], now: float) -> None:
        """Keep how long steps take, as far as looks twice a second can tell."""
        if not all(position.has_begun for position in positions):
            begun = len(self._pids) + sum(position.has_begun + bool(position.pid) for position in positions)
            if begun != self._begun:
                self._begun, self._advanced_at = begun, now
            self._step = -1
            return
        if self._step < 0:
            self._step, self._advanced_at = min(position.first_step for position in positions), now
        step, moves = min(position.step for position in positions), sum(position.moves for position in positions)
        # Ranks that have finished the step, and save, wait for those that have not: these say how long it may take.
        last = [position for position in positions if position.step == step]
        was_uneven, self._is_uneven = self._is_uneven, any(position.phase in _UNEVEN_PHASES for position in last)
        if not self._is_over and any(position.has_ended for position in positions):
            self._is_over, self._advanced_at = True, now
        if step > self._step:
            self._num_steps += step - self._step
            if not was_uneven:
                self._step_seconds.append((now - self._advanced_at) / (step - self._step))
            self._advanced_at = now
        elif was_uneven and (moves != self._moves or not self._is_uneven):
            self._advanced_at = now  # it evaluates another batch, or an evaluation, a save or slow input is over
        self._step, self._moves = step, moves

    def _limit(self, positions: list[Position]) -> float:
        """Seconds without a finished step that make a suspicion now; at the start, without any rank
        that comes further."""
        limits = self._limits
        if not all(position.has_begun for position in positions):
            return max(_LEAST_START_SECONDS, limits.timeout_seconds)
        if self._is_over:
            return limits.timeout_seconds
        if self._num_steps == 0 or self._is_uneven:
            return limits.timeout_seconds
        if limits.hang_seconds is not None:
            return limits.hang_seconds
        if self._num_steps < _FIRST_STEPS:
            return limits.timeout_seconds
        return min(limits.timeout_seconds, max(LEAST_SECONDS, _TIMES_LONGEST * self._longest_usual()))

    def _longest_usual(self) -> float:
        """The longest of 99 in 100 steps."""
        ordered = sorted(self._step_seconds)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0

    def _compare(self, positions: list[Position], now: float, stalled: float) -> RankExit | None:
        """Look a first or a second time, once the stacks that were asked for have been written."""
        assert self._asked_at is not None
        if now - self._asked_at < _BETWEEN_LOOKS_SECONDS:
            return None
        look = self._take_look(positions, now)
        before, self._first_look = self._first_look, look
        self._ask(now)
        if before is None:
            return None
        suspects = [rank for rank, stack in look.stacks.items() if not _waits(stack)]
        suspects = [rank for rank in suspects if not is_stopped(self._pid(rank, positions[rank]))]
        idle = [rank for rank in suspects if self._is_idle(rank, before, look)]
        # The first step may compile for as long as it wants; so may whatever is no step.
        is_step = self._num_steps > 0 and not self._is_uneven and not self._is_over
        is_late = self._limits.hang_seconds is not None or stalled >= self._limits.timeout_seconds
        hanging = idle or suspects if is_step and is_late else idle
        if self._step < 0 and len(suspects) > len(idle):
            return None  # a start takes its time where somebody still computes
        return self._outcome(hanging[0], positions[hanging[0]], look, stalled, idle) if hanging else None

    def _ask(self, now: float) -> None:
        """Let every rank write its stacks anew."""
        for rank in range(self._board.num_ranks):
            with suppress(OSError):
                os.truncate(stacks_path(self._folder, self._first_rank + rank), 0)
        self._ask_for_stacks()
        self._asked_at = now

    def _take_look(self, positions: list[Position], now: float) -> _Look:
        stacks: dict[int, str] = {}
        for rank in range(len(positions)):
            try:
                stacks[rank] = stacks_path(self._folder, self._first_rank + rank).read_text(errors="replace")
            except OSError:
                continue
        pids = {rank: self._pid(rank, position) for rank, position in enumerate(positions)}
        return _Look(now, {rank: _cpu_seconds(pid) for rank, pid in pids.items() if pid}, stacks)

    def _pid(self, rank: int, position: Position) -> int:
        """The process of a rank; 0 where it is not known."""
        return position.pid or self._pids.get(self._first_rank + rank, 0)

    @staticmethod
    def _is_idle(rank: int, before: _Look, now: _Look) -> bool:
        if rank not in now.cpu_seconds or rank not in before.cpu_seconds:
            return False
        computed = now.cpu_seconds[rank] - before.cpu_seconds[rank]
        same = _calls(now.stacks[rank]) == _calls(before.stacks.get(rank, ""))
        return same and computed < _IDLE_SHARE * (now.at - before.at)

    def _outcome(self, rank: int, position: Position, look: _Look, stalled: float, idle: list[int]) -> RankExit:
        usual = f"; 99 of 100 steps took at most {self._longest_usual():.2g} s" if self._step_seconds else ""
        return self._exit(rank, look, f"no progress for {stalled:.1f} s {position}{usual}. It {_does(rank in idle)}")

    def _exit(self, rank: int, look: _Look, message: str) -> RankExit:
        return RankExit(
            rank=self._first_rank + rank,
            host=socket.gethostname(),
            when=time.monotonic(),
            error=HANG,
            message=message,
            trace=_shown(look.stacks[rank]),
            status=1,
        )


def _does(is_idle: bool) -> str:
    return "waits outside of any collective" if is_idle else "computes without end"


def _is_elsewhere(stacks: str) -> bool:
    """Whether a rank has written its stacks, and is in no collective."""
    return bool(_threads(stacks)) and not _waits(stacks)


def _threads(stacks: str) -> list[list[re.Match[str]]]:
    """The calls of each thread, innermost first.  The main thread is the last: it was there before all others."""
    blocks = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    return [calls for block in blocks if (calls := list(_FRAME.finditer(block)))]


def _waits(stacks: str) -> bool:
    """Whether the rank is inside of a collective: the main thread, or one in which autograd runs its backward."""
    threads = _threads(stacks)
    main = threads[-1:]
    backward = [calls for calls in threads[:-1] if any("/torch/autograd/" in call["file"] for call in calls)]
    return any(
        any(name in call["file"] for name in _WAITING_FILES) for calls in main + backward for call in calls[:_INNERMOST]
    )


def _calls(stacks: str) -> list[tuple[str, ...]]:
    """The calls of the main thread, for a comparison."""
    threads = _threads(stacks)
    return [call.groups() for call in threads[-1]] if threads else []


def _shown(stacks: str) -> list[str]:
    """The innermost calls of the main thread, outermost first, as a traceback shows them."""
    threads = _threads(stacks)
    calls = threads[-1][:_SHOWN_FRAMES] if threads else []
    return [f"  {call['file']}, line {call['line']}, in {call['name']}" for call in reversed(calls)]


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process and of its descendants (compilers, data workers)."""
    return cpu_seconds_of(pid) + sum(map(_cpu_seconds, children_of(pid)))
