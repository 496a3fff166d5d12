"""What context parallelism sends.

Sources: ring attention, Liu et al. 2023 (arXiv 2310.01889); Ulysses, Jacobs et al. 2023 (arXiv 2309.14509).
"""

from __future__ import annotations

from weft.model.profile import Operator
from weft.techniques.context.token_runs import copies_of, exchanging_ranks
from weft.techniques.cost_terms import Sender


def context_traffic(sender: Sender) -> tuple[float, float]:
    """Return the exposed seconds, forward and backward: keys and values travel round the ring beside the attention, or
    are gathered; or heads change places."""
    share, group, seconds = sender.share, sender.key.context, sender.seconds
    forward = backward = 0.0
    if group.size == 1:
        return 0.0, 0.0
    for operator, work in sender.works:
        if operator.kind != "attention":
            continue
        tensor = 1 if operator.split in ("replicate", "sequence") else share.tensor
        heads = max(1.0, operator.kv_heads / tensor) * (operator.head_size + operator.value_head_size)
        keys = share.tokens * heads * share.element_bytes
        scheme, exchanging = sender.key.context_scheme, _exchanging(sender, operator)
        if scheme != "ulysses":
            longer = sender.device.parts_seconds(operator, share)
            forward, backward = forward + longer[0], backward + longer[1]
        ring = group.size // exchanging
        if exchanging > 1:
            # Where they do not divide the heads of keys, ranks get copies.
            keys *= copies_of(max(1, int(operator.kv_heads / tensor)), exchanging)
            queries = operator.heads / tensor * (operator.head_size + operator.value_head_size)
            swapped = keys + share.tokens * queries * share.element_bytes
            # Neighbours keep more of what they have than all ranks would.
            part = (1 - 1 / exchanging) / (1 - 1 / group.size)
            once = seconds("all_to_all", swapped, group) * part
            forward, backward = forward + once, backward + once
        if ring == 1:
            continue
        keys *= _shown(operator.window, share.sequence, group.size, exchanging)
        if scheme == "all_gather":
            whole = keys * group.size
            gather = seconds("all_gather", whole, group)
            # Gathered anew for the backward: only a rank's own keys wait for it.
            forward, backward = forward + gather, backward + gather + seconds("reduce_scatter", whole, group)
            continue
        # Each of the steps hides beside the attention over the keys that are there.
        beside = sender.device.calibration.overlap_share / ring
        sent = seconds("send", keys, group)
        forward += (ring - 1) * max(0.0, sent - beside * work.forward.seconds)
        backward += (ring - 1) * max(0.0, 2.0 * sent - beside * work.input.seconds)
    return forward, backward


def _exchanging(sender: Sender, operator: Operator) -> int:
    """Ranks that exchange heads of an attention."""
    key, tensor = sender.key, sender.share.tensor
    if key.context_scheme == "ulysses":
        return key.context.size
    if key.context_scheme != "usp":
        return 1
    heads, kv_heads = (int(max(1, number // tensor)) for number in (operator.heads, operator.kv_heads))
    return key.context_ulysses or exchanging_ranks(key.context.size, heads, kv_heads) or 1


def _shown(window: int | None, length: float, ranks: int, together: int) -> float:
    """Share of a rank's tokens that ranks show others, who see them through a window."""
    if window is None:
        return 1.0
    run = length / (2 * ranks / together)
    return min(1.0, (window - 1) / run)
