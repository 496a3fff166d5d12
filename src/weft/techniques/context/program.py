"""What ranks that share a sequence send: keys and values to one another, and the gradients of these back.

Forward and backward are those of `weft.techniques.context.exchange`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weft.outline import ModelShare, ModuleCall, RankSend
from weft.techniques.context.contract import Context
from weft.techniques.context.shares import copies_of, most_tokens, tokens_of


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
    _, heads, length, key_size = call.shape
    samples = share.of_microbatch(call.shape)[0]
    per_token = samples * heads // share.plan.mesh.tensor * (key_size + call.output[3]) * share.compute_bytes
    forwards = 2 if call.is_exit_repeated and share.recomputes(call.block) else 1
    visits = forwards + call.needs_gradient

    def size(source: int) -> int:
        return per_token * tokens_of(length, ranks, source % ranks)

    if share.plan.context_parallel.scheme == "ulysses":
        yield from _swapped(share, call, samples, forwards)
        return
    if share.plan.context_parallel.scheme == "all_gather":
        whole = ranks * per_token * most_tokens(length, ranks)
        yield _send(share, call, "all_gather", whole, visits, "keys and values")
        if call.needs_gradient:
            yield _send(share, call, "reduce_scatter", whole, 1, "gradients of keys and values")
        return
    steps = range(1, ranks)
    yield from _passed(share, call, "send", [size(mine - step + 1) for step in steps], visits, "keys and values")
    yield from _passed(share, call, "receive", [size(mine - step) for step in steps], visits, "keys and values")
    if call.needs_gradient:
        what = "gradients of keys and values"
        yield from _passed(share, call, "send", [size(mine - step) for step in steps], 1, what)
        yield from _passed(share, call, "receive", [size(mine - step - 1) for step in steps], 1, what)


def _swapped(share: ModelShare, call: ModuleCall, samples: int, forwards: int) -> Iterator[RankSend]:
    """Heads in exchange for tokens and back: what a rank brings are its own tokens of all heads, or all tokens of its
    heads."""
    ranks, tensor, (_, kv_heads, length, size) = share.plan.mesh.context, share.plan.mesh.tensor, call.shape
    heads, keys = call.heads // tensor, kv_heads // tensor * copies_of(kv_heads // tensor, ranks)
    own = tokens_of(length, ranks, share.coordinates["context"])
    element = samples * share.compute_bytes
    into = element * (heads * size + keys * (size + call.output[3]))
    back = element * heads * call.output[3]
    yield _send(share, call, "all_to_all", own * into, forwards, "queries, keys and values")
    yield _send(share, call, "all_to_all", length * back // ranks, forwards, "what heads made")
    if call.needs_gradient:
        yield _send(share, call, "all_to_all", own * back, 1, "gradients of what heads made")
        yield _send(share, call, "all_to_all", length * into // ranks, 1, "gradients of queries, keys and values")


def _passed(
    share: ModelShare, call: ModuleCall, operation: str, sizes: list[int], times: int, what: str
) -> Iterator[RankSend]:
    for size_bytes, count in Counter(sizes).items():
        yield _send(share, call, operation, size_bytes, count * times, what)


def _send(share: ModelShare, call: ModuleCall, operation: str, size_bytes: int, times: int, what: str) -> RankSend:
    return RankSend(
        operation=operation,  # pyright: ignore[reportArgumentType]
        axis="context",
        size_bytes=size_bytes,
        count=times * share.microbatches,
        technique=Context.name,
        reason=f"{what}, attention of {call.module}",
    )
