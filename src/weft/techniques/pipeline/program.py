"""What the ranks of a pipeline send one another: activations and their gradients, and once their shape."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from weft.techniques.pipeline.contract import Pipeline
from weft.techniques.pipeline.orders import schedule_orders
from weft.techniques.pipeline.routes import HEADER_WORDS, StageMessage, sent_by, wanted_by
from weft.techniques.send_trace import ModelShare, RankSend


def sends(share: ModelShare) -> Iterator[RankSend]:
    """Yield the messages of a rank in a step: what each of its actions needs from other ranks and makes for them."""
    pipeline = share.plan.mesh.pipeline
    if pipeline == 1:
        return
    mine, ranks = share.coordinates["pipeline"], share.stage_ranks
    counts: Counter[tuple[bool, str, int]] = Counter()
    for action in schedule_orders(*share.plan.pipeline_parallel.shape(pipeline), share.microbatches)[mine]:
        for is_sent, message in ((False, wanted_by(action, len(ranks))), (True, sent_by(action, len(ranks)))):
            if message is not None and _other_end(message, ranks, is_sent) != mine:
                counts[is_sent, message.kind, message.boundary] += 1
    for (is_sent, kind, boundary), count in counts.items():
        what = (
            f"{'gradients of ' if kind == 'gradient' else ''}activations between stages {boundary - 1} and {boundary}"
        )
        yield _message(is_sent, _bytes(share, boundary), count, what)
        if kind == "activation":
            yield _message(is_sent, 8 * HEADER_WORDS, 1, f"shape of {what}", is_first=True)


def _other_end(message: StageMessage, ranks: tuple[int, ...], is_sent: bool) -> int:
    if is_sent:
        return ranks[message.stage]
    return ranks[message.stage - 1 if message.kind == "activation" else message.stage + 1]


def _bytes(share: ModelShare, boundary: int) -> int:
    """Bytes of an activation at the border before a stage, which tensor ranks may have a shard of."""
    entry = share.outline.entries[share.cuts[boundary - 1]]
    if entry.crossing is not None:
        grows, stays = entry.crossing
        return (share.of_microbatch((grows,))[0] + stays) * share.compute_bytes
    samples, *rest = share.of_tokens(entry.shape)
    if share.grid is not None:
        rest[-1] //= share.grid.side
    if share.plan.tensor_parallel.sequence:
        length, ranks = rest[0], share.plan.mesh.tensor
        rest[0] = length // ranks + (share.coordinates["tensor"] < length % ranks)  # the longer shards come first
    return math.prod(share.of_microbatch((samples, *rest))) * share.compute_bytes


def _message(is_sent: bool, size_bytes: int, count: int, reason: str, *, is_first: bool = False) -> RankSend:
    return RankSend(
        operation="send" if is_sent else "receive",
        axis="pipeline",
        size_bytes=size_bytes,
        count=count,
        when="first" if is_first else "always",
        technique=Pipeline.name,
        reason=reason,
    )
