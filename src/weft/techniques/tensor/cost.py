"""What tensor parallelism sends: sums around the products that it splits, or lines of a grid.

Sources: Megatron-LM, Shoeybi et al. 2019 (arXiv 1909.08053), with sequence parallelism Korthikanti et al. 2022 (arXiv
2205.05198); SUMMA (van de Geijn and Watts 1997), Xu et al. 2021 (2-D, arXiv 2104.05343), Wang et al. 2021 (2.5-D, arXiv
2105.14500), Bian et al. 2021 (3-D, arXiv 2105.14450).
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.cluster import Collective
from weft.model.profile import Profile
from weft.techniques.cost_terms import Layout, Sender
from weft.techniques.tensor.mesh_2d.limits import samples_problem, shape_problem, sizes_problem
from weft.techniques.tensor.mesh_2d.shape import grid_shape


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
    summed = sender.summed_experts
    for operator, _ in sender.works:
        rows = share.tokens * operator.rows_per_token * share.element_bytes
        if operator.kind == "convolution":
            if operator.split == "row":
                forward += seconds("all_reduce", rows * operator.n, group)
            elif operator.summed_elements_per_token:
                size = share.tokens * operator.summed_elements_per_token * share.element_bytes
                backward += seconds("all_reduce", size, group)
        elif operator.split == "row" or operator is summed:
            size = rows * operator.n / (operator.rows_per_token if operator is summed else 1.0)
            once = sum(seconds(part, size, group) for part in parts)
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
    """What a framework does not hide beside the products."""
    framework, calibration = sender.device.framework, sender.device.calibration
    if framework.overlap_tensor:
        exposed = 1.0 - calibration.tensor_overlap_share
        return forward * exposed, backward * exposed
    if framework.overlap_tensor_backward:
        # Sums hide beside the products for the weights; what sequence parallelism gathers comes before them.
        weight_seconds = sum(work.weight.seconds for operator, work in sender.works if operator.split != "expert")
        sums = backward * (0.5 if sender.share.sequence_parallel else 1.0)
        backward -= min(sums, calibration.overlap_share * weight_seconds)
    return forward, backward


def _grid_traffic(sender: Sender, grid: tuple[int, int, int]) -> tuple[float, float]:
    """Gathered rows, columns and inner parts of every product, over lines of the grid."""
    share, group = sender.share, sender.key.tensor
    # A line of the grid is `columns` of the ranks; its gather over all of them costs (side−1)/side of (n−1)/n.
    line = (1 - 1 / grid[1]) / (1 - 1 / share.tensor)

    def seconds(elements: float) -> float:
        return sender.seconds("all_gather", elements * share.element_bytes, group) * line if elements else 0.0

    forward = backward = 0.0
    for operator, _ in sender.works:
        m, n, k = share.tokens * operator.rows_per_token, operator.n, operator.k
        if operator.kind == "matmul" and operator.split not in ("replicate", "expert", "sequence"):
            x, weight, y = (seconds(elements) for elements in grid_pieces(grid, m, n, k))
            forward += x + weight + y
            backward += 2.0 * (x + weight) + y  # what was gathered is gathered once more, and gradients are summed
        elif operator.kind == "gather" and operator.split == "vocab":
            # Rows of the table, of which a rank has a part of the features; then the sum over parts of the table.
            width = n or operator.elements_moved_per_token / 2
            once = seconds(operator.parameters / (grid[1] * grid[2])) + seconds(m * width / (grid[0] * grid[2]))
            forward, backward = forward + once, backward + once
    return forward, backward


def grid_pieces(grid: tuple[int, int, int], m: float, n: float, k: float) -> tuple[float, float, float]:
    """Return the elements of X, W and Y that a rank has after a gather along a line of the grid, of which it receives
    (side − 1)/side; Y is summed over ranks in a cube alone."""
    rows, columns, inner = grid
    return m * k / (rows * inner), k * n / (columns * inner), m * n / (rows * columns) if inner > 1 else 0.0


def received_elements(scheme: str, ranks: int, m: float, n: float, k: float) -> float:
    """Return the elements that each rank of a grid receives in forward and backward of a product of M×K by K×N, with
    the sum of gradients over layers of the grid."""
    grid = grid_of(scheme, ranks)
    assert grid is not None, f"{ranks} ranks form no {scheme} grid"
    side, depth = grid[1], grid[0] // grid[1] if grid[2] == 1 else 1
    x, weight, y = grid_pieces(grid, m, n, k)
    return (side - 1) / side * (3.0 * (x + weight) + 2.0 * y) + 2.0 * (depth - 1) / depth * k * n / side**2


def grid_of(scheme: str, ranks: int) -> tuple[int, int, int] | None:
    """Return how often M, N and K of a product are cut under a multi-dimensional split; None: one dimension."""
    shape = grid_shape(scheme, ranks)
    if shape is None:
        return None
    return (shape.side, shape.side, shape.side) if shape.is_cube else (shape.sample_parts, shape.side, 1)


def layout_problems(profile: Profile, layout: Layout) -> Iterator[str]:
    """Yield what stands against a layout's grid: the same as against a plan's, as far as a layout says it."""
    scheme = layout.tensor_scheme
    named, untried = f'scheme = "{scheme}"', f'does not join scheme = "{scheme}". Use'
    if problem := shape_problem(scheme, layout.tensor):
        yield f"{named} {_in_one_line(problem)}"
        return
    shape = grid_shape(scheme, layout.tensor)
    assert shape is not None, "it has no problem"
    if profile.num_experts:
        yield f'{named} cannot be had for a mixture of experts. Use "1d".'
    if problem := sizes_problem(shape, dict(profile.divisible), profile.hidden_size):
        yield f"{named} {_in_one_line(problem)}"
    if problem := samples_problem(shape, layout.microbatch_size):
        yield f"microbatch_size = {layout.microbatch_size} {_in_one_line(problem)}"
    if layout.sequence_parallel:
        yield f"sequence_parallel = true {untried} false."
    for axis in ("context", "expert"):
        if getattr(layout, axis) > 1:
            yield f"{axis} = {getattr(layout, axis)} {untried} 1."
    if layout.splits_backward:
        yield f"a backward in two passes {untried} a schedule with one."
    if layout.compresses:
        yield f"{layout.compression_setting} {untried} none."
    if layout.replicas_step_alone:
        yield f"what steps by itself {untried} none of it."
    if layout.offloads:
        yield f"what waits outside of the device {untried} nothing of it."
    if shape.is_cube and layout.fuses_loss:
        yield f"a fused loss {untried} none."


def _in_one_line(problem: str) -> str:
    return problem.replace("\n", " ")
