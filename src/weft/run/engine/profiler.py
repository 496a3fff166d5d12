"""Windows of `torch.profiler` on one rank: some steps, when somebody asks for them while the run goes on."""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.autograd import profiler as profilers
from torch.profiler import ProfilerActivity, profile

from weft.events import RunFolder
from weft.events.profile_request import ProfileRequest, facts_path, trace_path, window_folder
from weft.files import write_whole

logger = logging.getLogger(__name__)

_LOG_LEVEL = "KINETO_LOG_LEVEL"


class StepProfiler:
    """Profiles steps of one rank when the run is asked to.  No rank waits for another because of it.

    Starting and writing a trace take their time between two steps; while it is on, a step takes longer.
    """

    def __init__(self, run: RunFolder, rank: int, seen: int | None = None, *, look_seconds: float = 0.0) -> None:
        """`seen` is the number of the newest window that was asked of others; None: all that there are until now.
        Between two looks for a request there are at least `look_seconds`."""
        self._run, self._rank, self._look_seconds = run, rank, look_seconds
        if seen is None:
            newest = ProfileRequest.newest(run)
            seen = 0 if newest is None else newest.number
        self._seen = seen
        self._looked_at = -float("inf")
        self._is_off = False
        """Whether something has gone wrong."""
        self._asked: ProfileRequest | None = None
        """What this rank is to do, or does."""
        self._profile: profile | None = None
        self._first_step = 0
        self._began_ns = 0
        self._giving_way = ExitStack()
        """What watches, in a window, for profilers of the loop's own."""

    def after_step(self, step: int, elsewhere: Callable[[], object] = lambda: None) -> bool:
        """`step` steps are finished: begin or end a window, if it is time.  Return whether that took time.  Nothing
        that goes wrong in it ends a training: this rank goes on without profiles.

        Args:
            elsewhere: called before, if so: until the next step this rank does something that is none of a step.
        """
        try:
            return not self._is_off and self._after_step(step, elsewhere)
        except Exception as problem:
            self._leave_off(problem)
            return True

    def _after_step(self, step: int, elsewhere: Callable[[], object]) -> bool:
        asked = self._asked
        if asked is None:
            if (now := time.monotonic()) - self._looked_at < self._look_seconds:
                return False
            self._looked_at = now
            asked = self._asked = self._look()
        if asked is None:
            return False
        if self._profile is None:
            if step < asked.after_step:
                return False
            elsewhere()
            self._begin(step)
        elif step >= self._first_step + asked.num_steps - 1:
            elsewhere()
            self._end(asked, step)
        else:
            return False
        return True

    def close(self, step: int) -> None:
        """The loop is over: write what there is."""
        if self._is_off or self._profile is None or self._asked is None:
            return
        try:
            if step < self._first_step:  # it was to begin with a step that does not come
                self._stop()
            else:
                self._end(self._asked, step)
        except Exception as problem:
            self._leave_off(problem)

    def _leave_off(self, problem: Exception) -> None:
        self._is_off = True
        self._giving_way.close()
        logger.warning("weft profile is off on rank %d: %s: %s", self._rank, type(problem).__name__, problem)

    def _look(self) -> ProfileRequest | None:
        newest = ProfileRequest.newest(self._run)
        if newest is None or newest.number <= self._seen:
            return None
        self._seen = newest.number
        return newest if self._rank in newest.ranks else None

    def _begin(self, step: int) -> None:
        if _is_another_on():
            logger.warning("no steps are profiled for weft profile: the loop has a profiler of its own on.")
            self._asked = None
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile, self._first_step = profile(activities=activities), step + 1
        with _silent_kineto():
            self._profile.start()
        self._began_ns = time.perf_counter_ns()
        self._giving_way.enter_context(_before_other_profilers(self._give_way))

    def _give_way(self) -> None:
        """The loop begins a profiler of its own.  There can be one: a second takes the first one's events, and torch
        2.13 crashes when both write theirs."""
        self._stop()
        logger.warning("weft profile has given up its steps: the loop has begun a profiler of its own.")

    def _stop(self) -> profile:
        """Stop the window, and return what it has seen."""
        assert self._profile is not None
        ended, self._profile, self._asked = self._profile, None, None
        self._giving_way.close()
        ended.stop()
        return ended

    def _end(self, asked: ProfileRequest, step: int) -> None:
        """Stop, and write the trace.  A full disk costs the trace, and nothing else."""
        seconds = (time.perf_counter_ns() - self._began_ns) / 1e9
        ended = self._stop()
        window, host = window_folder(self._run, asked.number), socket.gethostname()
        facts = {"rank": self._rank, "host": host, "first_step": self._first_step, "last_step": step}
        try:
            ended.export_chrome_trace(str(trace_path(window, self._rank)))
            write_whole(facts_path(window, self._rank), json.dumps({**facts, "seconds": seconds}))
        except (OSError, RuntimeError) as problem:
            logger.warning("the trace of steps %d to %d was not written: %s", self._first_step, step, problem)
            with suppress(OSError):
                trace_path(window, self._rank).unlink(missing_ok=True)


def _is_another_on() -> bool:
    """Whether the loop has a profiler of its own that runs, or warms up: torch says nothing of the latter."""
    if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateUsage]  # torch has no public one
        return True
    kept = (each for each in gc.get_objects() if type(each) is profilers.profile)
    return any(each.entered and each.kineto_results is None for each in kept)


@contextmanager
def _before_other_profilers(call: Callable[[], None]) -> Generator[None]:
    """Within, call this once before any profiler of torch's is prepared or started.  torch has no hook for it: the two
    functions that all of them call are wrapped for the steps of the window."""
    names = [name for name in ("_prepare_profiler", "_run_on_profiler_start") if hasattr(profilers, name)]
    before = {name: getattr(profilers, name) for name in names}

    def wrapped(name: str) -> Callable[..., Any]:
        def begin(*arguments: Any, **options: Any) -> Any:
            call()  # which leaves this context
            return before[name](*arguments, **options)

        return begin

    for name in names:
        setattr(profilers, name, wrapped(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(profilers, name, function)


@contextmanager
def _silent_kineto() -> Generator[None]:
    """Let torch's tracer print nothing of what it begins and ends.  It reads the variable once, when it is loaded."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "6")  # errors are 4
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]
