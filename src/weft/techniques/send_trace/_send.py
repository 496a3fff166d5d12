"""One kind of collective or message of a rank's program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "receive"]
When = Literal["always", "first", "unused", "round", "warm_up", "after_warm_up", "reported"]
"""Steps in which it is sent: all; the first; those in which some parameter took no part; the ends of rounds of local
steps; those in which 1-bit Adam sends gradients exactly, and the later ones; those of which a training reports."""
Phase = Literal["gradients", "agreement", "update"]
"""Phase of the step: until gradients are summed; when ranks agree on the step; after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSend:
    """What a rank sends again and again in a step: an operation on as many bytes."""

    operation: Operation
    axis: str
    """Axis of the mesh, as recorded: a group that stands for two has the name of the one with fewer."""
    size_bytes: int
    """Size of the whole tensor on this rank: what an all-gather ends with and a reduce-scatter starts from."""
    count: int = 1
    """Number of such sends in a step."""
    when: When = "always"
    phase: Phase = "gradients"
    technique: str
    """Name of the technique that sends it."""
    reason: str
    """Purpose, as a line of a report says it."""
    rows_of: tuple[str, int] | None = None
    """What it sends rows of, and the number of the exchange: `size_bytes` is then that of one row, and only data decide
    how many there are: of a table as many as the rank with the most brings, of a mixture those that come to this
    rank's experts."""
    assumed_rows: int | None = None
    """How many rows of a mixture there are where nobody says: experts get equally many.  None: nothing is sent then."""
