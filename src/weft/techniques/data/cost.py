"""What data ranks exchange inside of a forward and a backward."""

from __future__ import annotations

from weft.techniques.cost_terms import Sender


def statistics_traffic(sender: Sender) -> tuple[float, float]:
    """Return the seconds, forward and backward, of batch norms over data ranks: mean, squares and count of each rank
    forward, two sums backward, all in fp32."""
    group, seconds = sender.key.statistics, sender.seconds
    forward = backward = 0.0
    for operator, _ in sender.works:
        if group is not None and operator.batch_statistics:
            is_divided = operator.split not in ("replicate", "sequence")
            numbers = 2 * operator.batch_statistics / (sender.share.tensor if is_divided else 1)
            forward += seconds("all_gather", 4.0 * (numbers + 1) * group.size, group)
            backward += seconds("all_reduce", 4.0 * numbers, group)
    return forward, backward
