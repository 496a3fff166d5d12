"""What expert parallelism sends."""

from __future__ import annotations

from weft.techniques.cost_terms import Sender

_NEVER_HIDDEN = 0.1
"""Share of the tokens' way that comes before there is anything to compute beside it."""
_CHOICE_BYTES = 8
"""The number of an expert, and what it counts."""


def expert_traffic(sender: Sender) -> tuple[float, float]:
    """Return the exposed seconds, forward and backward: tokens travel to their experts and back, in both passes."""
    share, framework = sender.share, sender.device.framework
    experts = [operator for operator, _ in sender.works if operator.split == "expert" and operator.n]
    if sender.key.expert.size == 1 or not experts:
        return 0.0, 0.0
    first, last = experts[0], experts[-1]
    parts = share.tensor // share.expert_tensor  # ranks that share out the tokens
    rows = share.tokens * share.element_bytes / parts
    if sender.key.expert_exchange == "all_gather":
        once = _gathered(sender, rows * first.k, rows * last.n, first.rows_per_token)
    else:
        once = _travel(sender, rows * first.k, first.rows_per_token)
        once += _travel(sender, rows * last.n, last.rows_per_token)
    if not framework.overlap_expert:
        return once, once
    beside = sender.device.calibration.overlap_share * sum(work.forward.seconds for _, work in sender.works)
    least = _NEVER_HIDDEN * once
    return max(least, once - beside), max(least, once - 2.0 * beside)


def _gathered(sender: Sender, own_bytes: float, made_bytes: float, copies: float) -> float:
    """Tokens of all ranks come to all, with their choices, and the sums of what experts make of them go home."""
    group, share = sender.key.expert, sender.share
    choices = share.tokens / (share.tensor // share.expert_tensor) * copies * _CHOICE_BYTES
    gathered = sum(sender.seconds("all_gather", size * group.size, group) for size in (choices, own_bytes))
    return gathered + sender.seconds("reduce_scatter", made_bytes * group.size, group)


def _travel(sender: Sender, size_bytes: float, copies: float) -> float:
    """Tokens of `size_bytes` go to `copies` experts each."""
    group = sender.key.expert
    seconds = sender.seconds("all_to_all", size_bytes * copies, group)
    if not sender.device.framework.sends_tokens_once or len(group.legs) < 2:
        return seconds
    inner = group.legs[0]
    nodes = group.size / inner.units
    # Of `copies` experts drawn at random, so many lie on different nodes.
    distinct = nodes * (1.0 - (1.0 - 1.0 / nodes) ** copies)
    within = size_bytes * copies * (inner.units - 1) / inner.units / inner.bandwidth
    return max(seconds * distinct / copies, within)
