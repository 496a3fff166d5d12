"""What ranks that share out experts send: rows to the experts of others, what these make of them, and gradients.

Forward and backward are those of `weft.techniques.expert.exchange`.  Only data decide how many rows come to a rank, so
what it sends back is a number of rows that the comparison is told, or an assumption: to all experts equally many.
Where all tokens are gathered (`weft.techniques.expert.gathered`), nothing depends on data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weft.techniques.expert.contract import Expert
from weft.techniques.expert.row_counts import most_tokens_of, rows_of_rank
from weft.techniques.send_trace import ModelShare, ModuleCall, Operation, RankSend

_COUNT_BYTES = 8
"""Size of the number of an expert's rows, or of a rank's tokens, int64."""
_CHOICE_BYTES = 4
_WEIGHT_BYTES = 4
"""Bytes of a choice's weight, which travels in fp32 or wider."""


def sends(share: ModelShare) -> Iterator[RankSend]:
    """Yield what a rank sends over the expert axis around each mixture, in all microbatches of a step."""
    if share.plan.mesh.expert == 1:
        return
    gathers = share.plan.expert_parallel.exchange == "all_gather"
    for part in share.parts:
        for call in part.calls:
            if gathers and call.kind == "mixture":
                yield from _gathered(share, call)
            elif not gathers and call.kind == "experts":
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


def _gathered(share: ModelShare, call: ModuleCall) -> Iterator[RankSend]:
    again = share.recomputes(call.block)
    forwards = 1 + share.runs_ahead + (again and call.is_entry_repeated)
    returns = 1 + share.runs_ahead + (again and call.is_exit_repeated)
    ranks = len(share.expert_ranks)
    tokens = ranks * _most_tokens(share, call)
    size_bytes = tokens * call.shape[-1] * share.compute_bytes
    weights = tokens * call.copies * max(_WEIGHT_BYTES, share.compute_bytes)
    yield _whole(share, call, "all_gather", ranks * _COUNT_BYTES, forwards, "numbers of tokens")
    yield _whole(share, call, "all_gather", tokens * call.copies * _CHOICE_BYTES, forwards, "choices of tokens")
    yield _whole(share, call, "all_gather", weights, forwards, "what choices count")
    yield _whole(share, call, "all_gather", size_bytes, forwards, "tokens")
    yield _whole(share, call, "reduce_scatter", size_bytes, returns, "what experts made of tokens")
    if call.gives_gradient:
        yield _whole(share, call, "all_gather", size_bytes, 1, "gradients of what experts made")
    if call.needs_gradient:
        yield _whole(share, call, "reduce_scatter", size_bytes, 1, "gradients of tokens")
    if call.weighs:
        yield _whole(share, call, "reduce_scatter", weights, 1, "gradients of what choices count")


def _most_tokens(share: ModelShare, call: ModuleCall) -> int:
    """Tokens of one microbatch on the rank with the most of those that share the experts out."""
    samples = share.of_microbatch(call.shape)[:-1]
    context, tokens = share.plan.mesh.context, math.prod(samples)
    if context == 1:
        return tokens
    return tokens // share.outline.tokens * most_tokens_of(share.outline.tokens, share.plan.mesh, share.expert_ranks)


def _whole(share: ModelShare, call: ModuleCall, operation: Operation, size: int, times: int, what: str) -> RankSend:
    return RankSend(
        operation=operation,
        axis="expert",
        size_bytes=size,
        count=times * share.microbatches,
        technique=Expert.name,
        reason=f"{what}, {call.module}",
    )


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
    return _whole(share, call, "all_to_all", size_bytes, times, what)


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
