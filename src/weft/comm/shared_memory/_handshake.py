"""How the ranks of a new group find out whether they can share memory, and open the engine on it.

Rank 0 makes a segment and says through the store where it is; every other rank tries to map it and reads its nonce.
That trial, not a count of local ranks, says who is on the same host.  What each rank lacks is then gathered, and where
one lacks anything nobody opens the engine: an answer that differed would be a deadlock.
"""

from __future__ import annotations

import ctypes
import json
import warnings
from dataclasses import dataclass

from weft.comm._failure import ErrorCode, Failure
from weft.comm.rendezvous import Rendezvous
from weft.comm.shared_memory._segment import OTHER_HOSTS, SharedSegment, Unreachable, create_segment, open_segment
from weft.comm.shared_memory._sources import digest
from weft.comm.shared_memory.engine import REBUILD, Engine, load_library, prepare
from weft.errors import CollectiveError

ARENA_BYTES = 1 << 30
"""Address space per rank for tensors that are reduced where they lie; it takes memory where it is written."""
MAX_RANKS = 128


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a rank brings to the forming of a group."""

    rendezvous: Rendezvous
    """The rendezvous at which all ranks of the group have arrived."""
    num_local_ranks: int
    """Ranks that compute on this machine in all: where they outnumber its cores, nobody spins."""
    warns: bool
    """Whether this rank warns where the group has to do without the engine."""
    use_engine: bool = True
    """False: as if the engine had not been built."""
    warns_of_hosts: bool = True
    """False: that ranks on several hosts use Gloo goes without saying."""

    def open_engine(self) -> Engine | None:
        """Return this rank's engine; None where some rank cannot take part.  Call on every rank of the group.

        Why there is none is said once, by the rank that warns.

        Raises:
            CollectiveError: a rank died, or did not come in time, on the way.
        """
        rank = self.rendezvous.rank
        segment: SharedSegment | None = None
        engine: Engine | None = None
        try:
            library, lacking = self._library()
            if library is not None or rank > 0:
                segment, unreachable = self._segment(library)
                lacking = unreachable or lacking
            if rank == 0:
                description = segment.describe() if segment is not None else json.dumps({"reason": lacking})
                self.rendezvous.say("segment", description)
            reasons = self._reasons(lacking)
            if not any(reasons):
                engine = self._open(library, segment)
            self.rendezvous.gather("opened", "")  # processes are known, and nobody opens the descriptor any more
        except BaseException as problem:
            if not isinstance(problem, CollectiveError):  # else all have been told
                self.rendezvous.give_up(Failure(ErrorCode.ABORTED, -1, rank))
            if engine is not None:
                engine.close()
            raise
        finally:
            if segment is not None:
                segment.forget_descriptor()
        if self.warns:  # last of all: a warning may be an error, and nobody waits for this rank
            self._warn(reasons)
        return engine

    def _reasons(self, lacking: str) -> list[str]:
        """Why each rank cannot take part, in their order; empty for one that can."""
        return self.rendezvous.gather("lacking", lacking)

    def _library(self) -> tuple[ctypes.CDLL | None, str]:
        """The engine, or why this rank has none that the others would understand.  An error here would leave them
        waiting."""
        library, reason = None, f"the C++ engine is not built there: install a C++ compiler and run {REBUILD}"
        try:
            library = load_library() if self.use_engine else None
        except CollectiveError as problem:
            reason = str(problem)
        if self.rendezvous.rank == 0:
            self.rendezvous.say("engine", digest() if library is not None else "")
        elif library is not None and self.rendezvous.hear("engine", 0) not in ("", digest()):
            return None, "rank 0 has another version of the engine: install the same Weft for all ranks"
        return library, "" if library is not None else reason

    def _segment(self, library: ctypes.CDLL | None) -> tuple[SharedSegment | None, str]:
        """Map the segment, or say why this rank cannot."""
        try:
            if self.rendezvous.rank > 0 or library is None:
                return open_segment(self.rendezvous.hear("segment", 0)), ""
            if len(self.rendezvous.ranks) > MAX_RANKS:
                raise Unreachable(f"a group of more than {MAX_RANKS} ranks does not fit")
            segment = create_segment(int(library.weft_segment_bytes(len(self.rendezvous.ranks), ARENA_BYTES)))
            prepare(library, segment, len(self.rendezvous.ranks), ARENA_BYTES)
        except Unreachable as problem:
            return None, str(problem)
        return segment, ""

    def _open(self, library: ctypes.CDLL | None, segment: SharedSegment | None) -> Engine:
        assert library is not None, "a rank without the engine says so"
        assert segment is not None, "a rank without the segment says so"
        return Engine(
            library,
            segment,
            rank=self.rendezvous.rank,
            num_ranks=len(self.rendezvous.ranks),
            num_local_ranks=self.num_local_ranks,
            arena_bytes=ARENA_BYTES,
        )

    def _warn(self, reasons: list[str]) -> None:
        first = next((rank for rank, reason in enumerate(reasons) if reason), None)
        if first is None or (OTHER_HOSTS in reasons and not self.warns_of_hosts):
            return
        warnings.warn(
            f"A group of {len(reasons)} ranks uses Gloo instead of shared memory: {reasons[first]} (rank {first}).",
            stacklevel=2,
        )
