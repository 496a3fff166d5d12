"""What tensor ranks send to take the loss over a vocabulary that they share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from weft.techniques.fused_loss.chunks import chunks_of
from weft.techniques.fused_loss.contract import FusedLoss
from weft.techniques.send_trace import ModelShare, RankSend
from weft.techniques.tensor.mesh_2d.shape import num_loss_replicas


def sends(share: ModelShare) -> Iterator[RankSend]:
    """Yield the gathers that make softmaxes whole, of all microbatches: two numbers per token and rank.

    Fused with the head, tokens without a label are left out, and the others come in chunks.
    """
    head, ranks = share.outline.vocabulary_head, num_loss_replicas(share.plan)
    if head is None or ranks == 1 or not share.parts[-1].is_last:
        return
    weight = share.outline.by_name[f"{head}.weight"]
    if weight.split is None:
        return
    wide, fuses = share.master_bytes, share.plan.memory.fuses_loss
    sizes: Counter[int] = Counter()
    for tokens in _tokens(share, fuses=fuses):
        chunks = [slice(0, tokens)]
        if fuses:
            chunks = chunks_of(tokens, weight.shape[0] // ranks * wide, on_cores=share.on_cores)
        sizes.update(2 * (rows.stop - rows.start) * ranks * wide for rows in chunks)
    for size_bytes, count in sizes.items():
        yield RankSend(
            operation="all_gather",
            axis="tensor" if share.grid is None else share.grid.heads,
            size_bytes=size_bytes,
            count=count * (2 if share.runs_ahead else 1),
            technique=FusedLoss.name,
            reason=f"softmax over the vocabulary, {head}",
        )


def _tokens(share: ModelShare, *, fuses: bool) -> list[int]:
    """Of each microbatch: those whose loss is taken."""
    outline = share.outline
    labels = outline.labels
    if outline.tokens and labels % outline.tokens == 0:  # a label for every token
        labels = math.prod(share.of_tokens((labels // outline.tokens, outline.tokens)))
    every = share.of_microbatch((labels,))[0]
    counting = share.labels
    if counting is None or not fuses:
        return [every] * share.microbatches
    return list(counting)
