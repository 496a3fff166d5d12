"""What tensor parallelism sends: sums around the products that it splits, or lines of a grid.

Sources: Megatron-LM, Shoeybi et al. 2019 (arXiv 1909.08053), with sequence parallelism Korthikanti et al. 2022 (arXiv
2205.05198); SUMMA (van de Geijn and Watts 1997), Xu et al. 2021 (2-D, arXiv 2104.05343), Wang et al. 2021 (2.5-D, arXiv
2105.14500), Bian et al. 2021 (3-D, arXiv 2105.14450).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.cluster import Collective
    from weft.price import Sender


def tensor_traffic(sender: Sender) -> tuple[float, float]:
    """Return the exposed seconds, forward and backward, of sums or their halves around the products that the tensor
    axis splits."""
    share, group, seconds = sender.share, sender.key.tensor, sender.seconds
    if group.size == 1:
        return 0.0, 0.0
    if share.grid is not None:
        return _grid_traffic(sender, share.grid)
    # With sequence parallelism an all-reduce comes in two halves, and what one layer gathers another has scattered.
    parts: tuple[Collective, ...] = ("reduce_scatter", "all_gather") if share.sequence_parallel else ("all_reduce",)

    def reduced(size_bytes: float) -> float:
        return seconds(parts[0], size_bytes, group)

    def gathered(size_bytes: float) -> float:
        return seconds("all_gather", size_bytes, group) if share.sequence_parallel else 0.0

    forward = backward = 0.0
    for operator, _ in sender.works:
        rows = share.tokens * operator.rows_per_token * share.element_bytes
        if operator.split == "row":
            once = sum(seconds(part, rows * operator.n, group) for part in parts)
            forward, backward = forward + once, backward + once
        elif operator.split == "vocab" and operator.kind == "gather":
            width = operator.n or operator.elements_moved_per_token / 2
            size = share.tokens * width * share.element_bytes
            forward += reduced(size)
            backward += gathered(size)
        elif operator.split == "vocab" and operator.kind == "matmul":
            forward += gathered(rows * operator.k)
            backward += reduced(rows * operator.k)
    return _exposed(sender, forward, backward)


def _exposed(sender: Sender, forward: float, backward: float) -> tuple[float, float]:
    """What a stack does not hide beside the products."""
    stack, calibration = sender.device.stack, sender.device.calibration
    if stack.overlap_tensor:
        exposed = 1.0 - calibration.tensor_overlap_share
        return forward * exposed, backward * exposed
    if stack.overlap_tensor_backward:
        # Sums hide beside the products for the weights; what sequence parallelism gathers comes before them.
        weight_seconds = sum(work.weight.seconds for operator, work in sender.works if operator.split != "expert")
        sums = backward * (0.5 if sender.share.sequence_parallel else 1.0)
        backward -= min(sums, calibration.overlap_share * weight_seconds)
    return forward, backward


def _grid_traffic(sender: Sender, grid: tuple[int, int, int]) -> tuple[float, float]:
    """Gathered rows, columns and inner parts of every product, over lines of the grid."""
    share, group = sender.share, sender.key.tensor
    rows, columns, inner = grid
    # A line of the grid is `columns` of the ranks; its gather over all of them costs (side−1)/side of (n−1)/n.
    line = (1 - 1 / columns) / (1 - 1 / share.tensor)
    forward = backward = 0.0
    for operator, _ in sender.works:
        if operator.kind not in ("matmul", "convolution") or operator.split in ("replicate", "expert", "sequence"):
            continue
        m, n, k = share.tokens * operator.rows_per_token, operator.n, operator.k
        if inner > 1:
            pieces = (m * k / (rows * inner), k * n / (columns * inner), m * n / (rows * columns))
        else:
            pieces = (m * k / rows, k * n / columns, 0.0)
        once = sum(sender.seconds("all_gather", piece * share.element_bytes, group) for piece in pieces) * line
        forward += once
        backward += 2.0 * once
    return forward, backward


def grid_of(scheme: str, ranks: int) -> tuple[int, int, int] | None:
    """Return how often M, N and K of a product are cut under a multi-dimensional split; None: one dimension."""
    if scheme == "1d" or ranks == 1:
        return None
    if scheme == "2d":
        side = math.isqrt(ranks)
        return side, side, 1
    if scheme == "2.5d":
        depth, side = tesseract(ranks)
        return depth * side, side, 1
    side = round(ranks ** (1 / 3))
    return side, side, side


def tesseract(ranks: int) -> tuple[int, int]:
    """Return depth and side of ranks = depth · side²: the largest side that is at least the depth."""
    for side in range(math.isqrt(ranks), 0, -1):
        if ranks % (side * side) == 0:
            return ranks // (side * side), side
    return ranks, 1
