"""Records this host's ranks where another host of the job collects: reads their rings, and sends what it has read.

What cannot be sent waits in a queue of a limited size; of more the oldest is left out, counted, and shown as a gap.
Nothing is raised, and nothing waits for it but the end of a generation, for half a second at most.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from weft.run.launch.memory_folder import RINGS, create_memory_folder, remove_memory_folder
from weft.watch.channel import MOST_BYTES, ChannelError, CollectorLink, encode
from weft.watch.host_reader import Dropped, HostClock, HostReader, RankRecording

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
NICENESS = 10
"""Niceness of the threads that record, which Linux keeps per thread: ranks go before them."""
NOT_RECORDED = "The run is not recorded: no folder could be made in /dev/shm (%s). Give the host, or container, one."
_MOST_WAITING_BYTES = 16 << 20
_REACH_SECONDS = 1.0
"""Time for the collector to take a frame, or to answer."""
_END_SECONDS = 0.5


@contextmanager
def record_host(collector: str, key: bytes) -> Generator[Path | None]:
    """Give the folder in which this host's ranks of one generation record what they do, and send it until they have
    ended.  None: the run is not recorded.

    Args:
        collector: its address and the number that the generation has there, as `10.0.0.1:40123/2`; empty: none.
        key: of the job, which the collector knows, too.
    """
    if not collector:
        yield None
        return
    rings = create_memory_folder(RINGS)
    if rings is None:
        logger.warning(NOT_RECORDED, "it does not exist or cannot be written")
        yield None
        return
    with report_rings(rings, rings, lambda: collector, key):
        yield rings


@contextmanager
def report_rings(rings: Path, generation: Path, collector: Callable[[], str], key: bytes) -> Generator[None]:
    """Send what ranks record in `generation`, a folder in `rings`, until they have ended; then remove `rings`.

    `collector` is asked where to send it, as for `record_host`, whenever there is no connection.
    """
    try:
        with _Sender(generation, collector, key):
            yield
    finally:
        remove_memory_folder(rings)


def be_nice() -> None:
    """Let ranks go before this thread."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


@final
class _Sender:
    """The thread that reads and sends."""

    def __init__(self, rings: Path, collector: Callable[[], str], key: bytes) -> None:
        self._collector, self._key, self._number = collector, key, 0
        self._reader = HostReader(rings)
        self._link: CollectorLink | None = None
        self._clock: HostClock | None = None
        self._waiting: deque[tuple[RankRecording, bytes]] = deque()
        self._waiting_bytes = 0
        self._lost: dict[int, int] = {}
        """Steps that were left out, by rank."""
        self._wants_stacks = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-recorder", daemon=True)

    def __enter__(self) -> None:
        with suppress(RuntimeError):  # the host starts no further thread: its ranks are not recorded
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        be_nice()
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(POLL_SECONDS)
            try:
                self._turn(is_last=is_over)
            except Exception:
                # Telemetry: whatever is wrong with it must not be seen by the run.
                logger.debug("this host's ranks cannot be recorded", exc_info=True)
        if self._link is not None:
            self._link.close()

    def _turn(self, *, is_last: bool) -> None:
        """Read, and send what can be sent.  At the end nobody is looked for again."""
        if not is_last:
            self._reach()
        if not self._number:
            return  # nobody has collected yet; the rings hold what there is
        for report in self._reader.reports(self._clock, with_stacks=self._wants_stacks):
            self._add(report)
        link = self._link
        if link is None:
            return
        try:
            while self._waiting:
                report, content = self._waiting[0]
                link.send(content, _REACH_SECONDS)
                self._waiting.popleft()
                self._waiting_bytes -= len(content)
            if is_last:
                link.ask(_END_SECONDS)  # all has come
        except (OSError, ChannelError) as problem:
            self._let_go(problem)

    def _reach(self) -> None:
        """Connect where there is no connection, and ask for the time."""
        try:
            if self._link is None:
                address, _, number = self._collector().partition("/")
                if not number:
                    return  # nobody collects yet
                self._number = int(number)
                self._link = CollectorLink(address, self._key, _REACH_SECONDS)
            wants_stacks = self._link.ask(_REACH_SECONDS)
            self._clock = self._link.clock
        except (OSError, ChannelError) as problem:
            self._let_go(problem)
            return
        if wants_stacks and not self._wants_stacks:
            self._reader.ask_for_stacks()
        self._wants_stacks = wants_stacks

    def _let_go(self, problem: Exception) -> None:
        logger.debug("the collector cannot be reached: %s", problem)
        if self._link is not None:
            self._link.close()
        self._link = None

    def _add(self, report: RankRecording) -> None:
        """Let a report wait to be sent."""
        if lost := self._lost.pop(report.rank, 0):
            report.dropped = (*report.dropped, Dropped(0, 0, lost, "the collector could not be reached in time"))
        content = encode(self._number, report)
        if len(content) > MOST_BYTES:
            self._lost[report.rank] = len(report.steps)
            return
        self._waiting.append((report, content))
        self._waiting_bytes += len(content)
        while self._waiting_bytes > _MOST_WAITING_BYTES:
            old, old_content = self._waiting.popleft()
            self._waiting_bytes -= len(old_content)
            self._lost[old.rank] = self._lost.get(old.rank, 0) + len(old.steps) + sum(one.steps for one in old.dropped)
