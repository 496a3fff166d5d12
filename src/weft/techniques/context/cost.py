"""What context parallelism sends.

Sources: ring attention, Liu et al. 2023 (arXiv 2310.01889); Ulysses, Jacobs et al. 2023 (arXiv 2309.14509).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.price import Sender


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
        heads = max(1.0, operator.kv_heads / share.tensor) * (operator.head_size + operator.value_head_size)
        keys = share.tokens * heads * share.element_bytes
        if sender.key.context_scheme != "ulysses":
            longer = sender.device.parts_seconds(operator, share)
            forward, backward = forward + longer[0], backward + longer[1]
        if sender.key.context_scheme == "ring":
            # Each of the steps hides beside the attention over the keys that are there.
            beside = sender.device.calibration.overlap_share / group.size
            steps = group.size - 1
            sent = seconds("send", keys, group)
            forward += steps * max(0.0, sent - beside * work.forward.seconds)
            backward += steps * max(0.0, 2.0 * sent - beside * work.input.seconds)
        elif sender.key.context_scheme == "all_gather":
            whole = keys * group.size
            gather = seconds("all_gather", whole, group)
            # Gathered anew for the backward: only a rank's own keys wait for it.
            forward, backward = forward + gather, backward + gather + seconds("reduce_scatter", whole, group)
        else:
            # Ranks that outnumber the heads of keys get copies.
            keys *= max(1.0, group.size * share.tensor / max(1, operator.kv_heads))
            queries = operator.heads / share.tensor * (operator.head_size + operator.value_head_size)
            swapped = keys + share.tokens * queries * share.element_bytes
            once = seconds("all_to_all", swapped, group)
            forward, backward = forward + once, backward + once
    return forward, backward
