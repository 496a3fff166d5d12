"""How the ranks of a new group find out whether they can share memory, and by which transport.

Rank 0 makes a segment and says through the store where it is; every other rank tries to map it and reads its nonce.
That trial, not a count of local ranks, says who is on the same host.  What each can do is then gathered, and the least
of it is what all use: an answer that differed would be a deadlock.
"""

from __future__ import annotations

import ctypes
import json
import warnings
from dataclasses import dataclass

from weft.comm.shared_memory._call import Failure, Transport, Trouble
from weft.comm.shared_memory._engine import REBUILD, Engine, load_library, prepare
from weft.comm.shared_memory._fallback import PythonTransport, may_work_here, segment_bytes
from weft.comm.shared_memory._roll import RollCall
from weft.comm.shared_memory._segment import OnAnotherHost, SharedSegment, Unreachable, create_segment, open_segment
from weft.comm.shared_memory._sources import digest
from weft.errors import CollectiveError

ARENA_BYTES = 1 << 30
"""Address space per rank for tensors that are reduced where they lie; it takes memory where it is written."""
MAX_RANKS = 128
_ELSEWHERE, _NONE, _PYTHON, _ENGINE = range(-1, 3)


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a rank brings to the forming of a group."""

    roll: RollCall
    rank: int
    num_ranks: int
    num_local_ranks: int
    speaks: bool
    """Whether this rank warns of what all of them have settled for."""
    use_engine: bool = True
    """False: as if it had not been built."""
    speaks_of_hosts: bool = True
    """False: that ranks on several hosts use Gloo goes without saying."""

    def settle(self) -> Transport | None:
        """Return this rank's transport; None where the ranks cannot share memory.  Call on every rank of the group.

        What is slower than it could be is said once, by the rank that speaks.

        Raises:
            CollectiveError: a rank died, or did not come in time, on the way.
        """
        library, unbuilt = self._library()
        segment: SharedSegment | None = None
        transport: Transport | None = None
        try:
            segment, lacking, reason = self._segment(library)
            if self.rank == 0:
                self.roll.say("segment", segment.describe() if segment else json.dumps({"reason": reason}))
            levels = self._levels(segment, lacking, library, reason or unbuilt)
            settled = min(levels)
            transport = self._open(settled, library, segment)
            self.roll.gather("opened", "")  # processes are known, and nobody opens the descriptor any more
        except BaseException as problem:
            if not isinstance(problem, CollectiveError):  # else all have been told
                self.roll.give_up(Failure(Trouble.ABORTED, -1, self.rank))
            if transport is not None:
                transport.close()
            raise
        finally:
            if segment is not None:
                segment.forget_descriptor()
        is_news = settled < _ENGINE and (settled > _ELSEWHERE or self.speaks_of_hosts)
        if self.speaks and is_news:  # last of all: a warning may be an error, and nobody waits for this rank
            self._say(settled, levels)
        return transport

    def _levels(
        self, segment: SharedSegment | None, lacking: int, library: ctypes.CDLL | None, reason: str
    ) -> list[int]:
        """What every rank could take part in; `lacking` is what it comes to without a segment."""
        level = lacking if segment is None else _ENGINE if library is not None else _PYTHON
        if level == _PYTHON and not may_work_here():
            level, reason = _NONE, "there is no C++ engine here, and Python's own needs an x86-64 Linux"
        if level < _ENGINE:
            self.roll.say("why", reason)
        return [int(told) for told in self.roll.gather("level", str(level))]

    def _library(self) -> tuple[ctypes.CDLL | None, str]:
        """The engine, or why this rank has none that the others would understand.  An error here would leave them
        waiting."""
        library, reason = None, f"it is not built there: install a C++ compiler and run {REBUILD}"
        try:
            library = load_library() if self.use_engine else None
        except CollectiveError as problem:
            reason = str(problem)
        if self.rank == 0:
            self.roll.say("engine", digest() if library is not None else "")
        elif library is not None and self.roll.hear("engine", 0) not in ("", digest()):
            return None, "rank 0 has another version of it: install the same Weft for all ranks"
        return library, reason

    def _segment(self, library: ctypes.CDLL | None) -> tuple[SharedSegment | None, int, str]:
        """Map the segment, or say what this rank can do instead and why."""
        try:
            if self.rank > 0:
                return open_segment(self.roll.hear("segment", 0)), _NONE, ""
            if self.num_ranks > MAX_RANKS:
                raise Unreachable(f"a group of more than {MAX_RANKS} ranks does not fit")
            segment = create_segment(self._segment_bytes(library))
            if library is not None:
                prepare(library, segment, self.num_ranks, ARENA_BYTES)
        except Unreachable as problem:
            return None, _ELSEWHERE if isinstance(problem, OnAnotherHost) else _NONE, str(problem)
        return segment, _NONE, ""

    def _segment_bytes(self, library: ctypes.CDLL | None) -> int:
        """Room for whichever transport it comes to."""
        engine = 0 if library is None else int(library.weft_segment_bytes(self.num_ranks, ARENA_BYTES))
        return max(engine, segment_bytes(self.num_ranks))

    def _open(self, settled: int, library: ctypes.CDLL | None, segment: SharedSegment | None) -> Transport | None:
        if settled <= _NONE or segment is None:
            return None
        if settled == _PYTHON or library is None:
            return PythonTransport(segment, rank=self.rank, num_ranks=self.num_ranks)
        return Engine(
            library,
            segment,
            rank=self.rank,
            num_ranks=self.num_ranks,
            num_local_ranks=self.num_local_ranks,
            arena_bytes=ARENA_BYTES,
        )

    def _say(self, settled: int, levels: list[int]) -> None:
        if settled == _PYTHON:
            without = [rank for rank, level in enumerate(levels) if level == _PYTHON]
            why = self.roll.hear("why", without[0])
            text = (
                f"A group of {self.num_ranks} ranks shares memory by pure Python, the same results 2 to 5 times slower:"
                f" rank {without[0]} lacks the engine ({why})."
            )
        else:
            first = next(rank for rank, level in enumerate(levels) if level <= _NONE)
            why = self.roll.hear("why", first)
            text = f"A group of {self.num_ranks} ranks uses Gloo instead of shared memory: {why} (rank {first})."
        warnings.warn(text, stacklevel=2)
