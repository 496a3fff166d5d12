"""What ranks that share a sequence send: keys and values to one another, and the gradients of these back.

Forward and backward are those of `weft.techniques.context.exchange`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weft.outline import ModelShare, ModuleCall, RankSend
from weft.techniques.context.contract import Context
from weft.techniques.context.shares import most_tokens, tokens_of


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
    visits = (2 if call.is_exit_repeated and share.recomputes(call.block) else 1) + call.needs_gradient

    def size(source: int) -> int:
        return per_token * tokens_of(length, ranks, source % ranks)

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
