"""What ranks that share out experts send: rows to the experts of others, what these make of them, and gradients.

Forward and backward are those of `weft.techniques.expert.exchange`.  Only data decide how many rows come to a rank, so
what it sends back is a number of rows that the comparison is told, or an assumption: to all experts equally many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weft.outline import ModelShare, ModuleCall, RankSend
from weft.techniques.expert.contract import Expert
from weft.techniques.expert.shares import rows_of_rank

_COUNT_BYTES = 8
"""Size of the number of an expert's rows, int64."""


def sends(share: ModelShare) -> Iterator[RankSend]:
    """Yield what a rank sends over the expert axis around each mixture, in all microbatches of a step."""
    if share.plan.mesh.expert == 1:
        return
    for part in share.parts:
        for call in part.calls:
            if call.kind == "experts":
                yield from _around(share, call)


def _around(share: ModelShare, call: ModuleCall) -> Iterator[RankSend]:
    again = share.recomputes(call.block)
    forwards = 1 + share.runs_ahead + (again and call.is_entry_repeated)
    returns = 1 + share.runs_ahead + (again and call.is_exit_repeated)
    yield _sent(share, call, call.experts * _COUNT_BYTES, forwards, "numbers of rows")
    yield _sent(share, call, _own_rows(share, call) * _row_bytes(share, call), forwards, "rows")
    yield from _returned(share, call, returns, "what experts made of rows")
    if call.gives_gradient:
        size_bytes = _own_rows(share, call) * _row_bytes(share, call)
        yield _sent(share, call, size_bytes, 1, "gradients of what experts made")
    if call.needs_gradient:
        yield from _returned(share, call, 1, "gradients of rows")


def _own_rows(share: ModelShare, call: ModuleCall) -> int:
    """Rows that this rank's own tokens make, of one microbatch."""
    outline = share.outline
    rows = share.of_microbatch(call.shape)[0]
    if share.plan.mesh.context == 1:
        return rows
    return rows // outline.tokens * share.of_tokens((1, outline.tokens))[1]


def _row_bytes(share: ModelShare, call: ModuleCall) -> int:
    return math.prod(call.shape[1:]) * share.compute_bytes


def _sent(share: ModelShare, call: ModuleCall, size_bytes: int, times: int, what: str) -> RankSend:
    return RankSend(
        operation="all_to_all",
        axis="expert",
        size_bytes=size_bytes,
        count=times * share.microbatches,
        technique=Expert.name,
        reason=f"{what}, {call.module}",
    )


def _returned(share: ModelShare, call: ModuleCall, times: int, what: str) -> Iterator[RankSend]:
    """What goes back where rows came from: in each microbatch as many as came."""
    ranks = share.expert_ranks
    assumed = rows_of_rank(_own_rows(share, call), call.experts, len(ranks), ranks.index(share.rank))
    for microbatch in range(share.microbatches):
        yield RankSend(
            operation="all_to_all",
            axis="expert",
            size_bytes=_row_bytes(share, call),
            count=times,
            technique=Expert.name,
            reason=f"{what}, {call.module}",
            rows_of=(call.module, microbatch),
            assumed_rows=assumed,
        )
