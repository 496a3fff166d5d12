"""What ranks that share a sequence send: keys and values to one another, and the gradients of these back.

Forward and backward are those of `weft.techniques.context.exchange`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weft.techniques.context.contract import Context
from weft.techniques.context.token_runs import BETWEEN, HEADS, Shown, copies_of, exchanging_ranks, tokens_of
from weft.techniques.send_trace import ModelShare, ModuleCall, RankSend


def sends(share: ModelShare) -> Iterator[RankSend]:
    """Yield what a rank sends over the context axis around each attention, in all microbatches of a step."""
    if share.plan.mesh.context == 1:
        return
    for part in share.parts:
        for call in part.calls:
            if call.kind == "attention":
                yield from _around(share, call)


def _around(share: ModelShare, call: ModuleCall) -> Iterator[RankSend]:
    ranks, mine = share.plan.mesh.context, share.coordinates["context"]
    scheme, kv_heads = share.plan.context_parallel.scheme, _own(share, call, call.shape[1])
    if scheme == "ulysses":
        yield from _swapped(share, call, "context", ranks, 1)
        return
    if scheme != "usp":
        yield from _shown(share, call, "context", kv_heads, Shown(call.shape[2], ranks, _window(call)), mine)
        return
    tensor = share.plan.mesh.tensor
    counts = call.heads // tensor, max(1, call.shape[1] // tensor)
    neighbours = share.plan.context_parallel.ulysses or exchanging_ranks(ranks, *counts)
    yield from _swapped(share, call, HEADS, neighbours, ranks // neighbours)
    some = kv_heads * copies_of(kv_heads, neighbours) // neighbours
    between = Shown(call.shape[2], ranks // neighbours, _window(call), neighbours)
    yield from _shown(share, call, BETWEEN, some, between, mine // neighbours)


def _own(share: ModelShare, call: ModuleCall, heads: int) -> int:
    """Heads that a tensor rank has of so many."""
    return heads // share.plan.mesh.tensor if call.is_divided else heads


def _window(call: ModuleCall) -> int | None:
    return call.window if call.window is not None and call.window < call.shape[2] else None


def _shown(
    share: ModelShare, call: ModuleCall, axis: str, kv_heads: int, shown: Shown, mine: int
) -> Iterator[RankSend]:
    """Keys and values of so many heads that each of a group shows the others: round a ring, or gathered."""
    ranks = shown.ranks
    samples = share.of_microbatch(call.shape)[0]
    per_token = samples * kv_heads * (call.shape[3] + call.output[3]) * share.compute_bytes
    visits = _forwards(share, call) + call.needs_gradient
    if not shown.most:  # each token sees itself alone
        return
    if share.plan.context_parallel.scheme == "all_gather":
        whole = ranks * per_token * shown.most
        yield _send(share, call, axis, "all_gather", whole, visits, "keys and values")
        if call.needs_gradient:
            yield _send(share, call, axis, "reduce_scatter", whole, 1, "gradients of keys and values")
        return

    def sizes(first: int) -> list[int]:
        return [per_token * shown.tokens((first - step) % ranks) for step in range(ranks - 1)]

    yield from _passed(share, call, axis, "send", sizes(mine), visits, "keys and values")
    yield from _passed(share, call, axis, "receive", sizes(mine - 1), visits, "keys and values")
    if call.needs_gradient:
        what = "gradients of keys and values"
        yield from _passed(share, call, axis, "send", sizes(mine - 1), 1, what)
        yield from _passed(share, call, axis, "receive", sizes(mine - 2), 1, what)


def _forwards(share: ModelShare, call: ModuleCall) -> int:
    """Recomputation repeats what was computed before the last tensor that is kept, but a compiler only that with which
    such a tensor is computed: the backward of attention needs what it made."""
    needed = call.needs_gradient or call.is_exit_needed
    is_repeated = needed if share.plan.compute.compile else call.is_exit_repeated
    return 2 if is_repeated and share.recomputes(call.block) else 1


def _swapped(share: ModelShare, call: ModuleCall, axis: str, ranks: int, groups: int) -> Iterator[RankSend]:
    """Heads in exchange for tokens and back: what a rank brings are its own tokens of all heads, or all tokens of its
    group of its heads."""
    _, kv_heads, length, size = call.shape
    heads, keys = (_own(share, call, number) for number in (call.heads, kv_heads))
    keys *= copies_of(keys, ranks)
    mine = share.coordinates["context"]
    first = mine - mine % ranks
    tokens = [tokens_of(length, ranks * groups, first + place) for place in range(ranks)]
    own, every = tokens[mine - first], sum(tokens)
    element = share.of_microbatch(call.shape)[0] * share.compute_bytes
    into = element * (heads * size + keys * (size + call.output[3]))
    back = element * heads * call.output[3]
    forwards = _forwards(share, call)
    yield _send(share, call, axis, "all_to_all", own * into, forwards, "queries, keys and values")
    # A compiler exchanges anew what heads made only for those that keep it: the backward of an exchange needs nothing.
    returns = forwards if call.is_exit_needed or not share.plan.compute.compile else 1
    yield _send(share, call, axis, "all_to_all", every * back // ranks, returns, "what heads made")
    if call.needs_gradient:
        yield _send(share, call, axis, "all_to_all", own * back, 1, "gradients of what heads made")
        yield _send(share, call, axis, "all_to_all", every * into // ranks, 1, "gradients of queries, keys and values")


def _passed(
    share: ModelShare, call: ModuleCall, axis: str, operation: str, sizes: list[int], times: int, what: str
) -> Iterator[RankSend]:
    for size_bytes, count in Counter(sizes).items():
        yield _send(share, call, axis, operation, size_bytes, count * times, what)


def _send(
    share: ModelShare, call: ModuleCall, axis: str, operation: str, size_bytes: int, times: int, what: str
) -> RankSend:
    return RankSend(
        operation=operation,  # pyright: ignore[reportArgumentType]
        axis=axis,
        size_bytes=size_bytes,
        count=times * share.microbatches,
        technique=Context.name,
        reason=f"{what}, attention of {call.module}",
    )
