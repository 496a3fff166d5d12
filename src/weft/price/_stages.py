"""What one microbatch costs in each block, and in the stages that blocks make up."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from weft.cluster import Collective
from weft.price._block_factors import BlockFit, block_fit
from weft.price._compute import Device, OperatorWork, Share, Work, operator_work
from weft.price._kept import BoundedCache
from weft.price._layout import Layout
from weft.price._placement import AxisGroup, Groups
from weft.profile import Block, Operator, Profile


class Seconds(Protocol):
    """Seconds of a collective: see `collective_seconds`."""

    def __call__(self, kind: Collective, size_bytes: float, group: AxisGroup, algorithm: str = "auto", /) -> float: ...


class PassCost(NamedTuple):
    """Seconds of one pass of one microbatch through a block on one rank, by cause."""

    ideal: float = 0.0
    shapes: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    statistics: float = 0.0
    """Exchange of batch norms' statistics between data ranks."""

    @property
    def compute(self) -> float:
        return self.ideal + self.shapes + self.memory

    @property
    def seconds(self) -> float:
        return sum(self)


class BlockCost(NamedTuple):
    """One microbatch in one block on one rank."""

    forward: PassCost
    input: PassCost
    """Backward as far as the gradient of the block's input."""
    weight: PassCost
    """The rest of backward."""
    selective: PassCost
    """What `recompute = "selective"` computes again."""
    dense_parameters: float
    """Elements of the weights that one rank of the tensor axis has, experts left out."""
    expert_parameters: float
    """Elements of one expert rank's experts."""
    kept_bytes: float
    """Activations of one microbatch that wait for its backward."""

    def again(self, recompute: str) -> PassCost:
        """What is computed again before the backward."""
        return self.forward if recompute == "full" else self.selective if recompute == "selective" else PassCost()


Works = list[tuple[Operator, OperatorWork]]


class _BlockWork(NamedTuple):
    """A block on one rank with nothing sent."""

    works: Works
    alone: BlockCost


class CostKey(NamedTuple):
    """All that the cost of a block depends on, beside the block."""

    samples: int
    sequence_parallel: bool
    tensor_scheme: str
    context_scheme: str
    precision: str
    gradient_bytes: int
    tensor: AxisGroup
    context: AxisGroup
    expert: AxisGroup
    statistics: AxisGroup | None
    """Data ranks that exchange the statistics of batch norms; None where the model has none."""


class BlockCosts:
    """Costs of blocks, kept by what they depend on."""

    def __init__(self, profile: Profile, device: Device, seconds: Seconds) -> None:
        self._profile, self._device, self._seconds = profile, device, seconds
        self._costs = BoundedCache[tuple[int, CostKey], BlockCost]()
        self._works: dict[tuple[int, Share], _BlockWork] = {}
        self._parts = BoundedCache[tuple[object, ...], tuple[float, float]]()
        self._sums = BoundedCache[tuple[object, ...], float]()
        self._shares: dict[Share, Share] = {}
        self._counted = profile.count_blocks()
        self._fits: dict[str, BlockFit] = {}

    def cost(self, block: Block, key: CostKey) -> BlockCost:
        """Return what one microbatch costs in a block."""
        found = self._costs.get((id(block), key))
        if found is None:
            found = self._costs[id(block), key] = self._price(block, key)
        return found

    def sums(self, key: CostKey) -> tuple[float, float]:
        """Return the seconds of one microbatch in all blocks but stem and tail, and what of it is computing.

        Half a million arrangements of axes differ in a few groups, so what each axis sends is summed by its group.
        """
        share = share_of(self._profile, key)
        share = self._shares.setdefault(share, share)  # half a million keys hold one object each
        computing = self._sums.get((share,))
        if computing is None:
            costs = [(self._known_work(block, share).alone, count) for block, count in self._counted]
            computing = self._sums[(share,)] = sum(
                count * part.compute for cost, count in costs for part in (cost.forward, cost.input, cost.weight)
            )
        whole = computing
        for axis, group in _groups_of(key):
            index = (share, axis, group)
            if index not in self._sums:
                self._sums[index] = sum(
                    count * sum(self._sent(block, share, key, axis)) for block, count in self._counted
                )
            whole += self._sums[index]
        return whole, computing

    def _price(self, block: Block, key: CostKey) -> BlockCost:
        share = share_of(self._profile, key, wide=block is self._profile.stem or block is self._profile.tail)
        alone = self._known_work(block, share).alone
        parts = [self._part(block, share, key, axis, group) for axis, group in _groups_of(key)]
        forward, backward = zip(*parts, strict=True)
        return alone._replace(
            forward=PassCost(*alone.forward[:_COMPUTED], *forward), input=PassCost(*alone.input[:_COMPUTED], *backward)
        )

    def _known_work(self, block: Block, share: Share) -> _BlockWork:
        index = (id(block), share)
        if index not in self._works:
            self._works[index] = self._work(block, share)
        return self._works[index]

    def _part(self, block: Block, share: Share, key: CostKey, axis: str, group: object) -> tuple[float, float]:
        """Exposed seconds, forward and backward, of what a block sends over one axis; known by the axis's group."""
        index = (id(block), share, axis, group)
        if index not in self._parts:
            self._parts[index] = self._sent(block, share, key, axis)
        return self._parts[index]

    def _sent(self, block: Block, share: Share, key: CostKey, axis: str) -> tuple[float, float]:
        sent = _Sent(block, share, key, self._seconds, self._device)
        return sent.over(axis, self._known_work(block, share).works)

    def _work(self, block: Block, share: Share) -> _BlockWork:
        """What a rank computes in a block, wherever its groups lie."""
        is_even = share.expert == 1 or self._device.stack.balances_experts
        imbalance = 1.0 if is_even else self._device.calibration.expert_imbalance
        works = [(operator, operator_work(self._device, operator, share, imbalance)) for operator in block.operators]
        if self._device.speeds:
            fit = self._fit(share.precision)
            works = [
                (operator, self._accumulated(operator, fit.of(operator, work, inside=not share.wide), share))
                for operator, work in works
            ]
        dense, expert = _parameters(block, share)
        alone = BlockCost(
            forward=self._pass([work.forward for _, work in works]),
            input=self._pass([work.input for _, work in works]),
            weight=self._pass([work.weight for _, work in works]),
            selective=self._pass([work.forward for operator, work in works if operator.selective]),
            dense_parameters=dense,
            expert_parameters=expert,
            kept_bytes=_kept_bytes(block, share),
        )
        return _BlockWork(works, alone)

    def _accumulated(self, operator: Operator, work: OperatorWork, share: Share) -> OperatorWork:
        """Gradients of weights are added to those of earlier microbatches; a table's are cleared first, all of them."""
        elements = operator.n * operator.k * operator.groups if operator.kind == "matmul" else operator.parameters
        if not elements or not (operator.parameters or operator.split == "vocab"):
            return work
        parts = share.expert if operator.split == "expert" else share.tensor
        once = share.element_bytes * (2.0 if operator.kind == "gather" else 1.0) + 2.0 * share.gradient_bytes
        size = elements / (1 if operator.split in ("replicate", "sequence") else parts) * once
        return work._replace(weight=work.weight.plus(self._device.moved(size)))

    def _fit(self, precision: str) -> BlockFit:
        """What measured blocks took beside the sum of their operators."""
        if precision not in self._fits:
            self._fits[precision] = block_fit(self._device, precision)
        return self._fits[precision]

    def _pass(self, works: list[Work]) -> PassCost:
        """Add up kernels; where the host issues them more slowly than they run, the difference is lost to shapes."""
        ideal, shapes, memory, kernels = (sum(column) for column in zip(*works, strict=True)) if works else (0.0,) * 4
        waiting = max(0.0, kernels * self._device.host_seconds - (ideal + shapes + memory))
        return PassCost(ideal=ideal, shapes=shapes + waiting, memory=memory)


_COMPUTED = 3
"""Fields of a `PassCost` that are computing; the others are what `_groups_of` sends, in its order."""


def _groups_of(key: CostKey) -> tuple[tuple[str, object], ...]:
    """Axes over which blocks send, each with all that decides how long it takes beside a rank's share."""
    return (
        ("tensor", key.tensor),
        ("context", (key.context, key.context_scheme)),
        ("expert", key.expert),
        ("statistics", key.statistics),
    )


def share_of(profile: Profile, key: CostKey, *, wide: bool = False) -> Share:
    """Return what one rank has of the work."""
    return Share(
        samples=key.samples,
        sequence=profile.sequence_length,
        tensor=key.tensor.size,
        context=key.context.size,
        expert=key.expert.size,
        sequence_parallel=key.sequence_parallel,
        grid=grid_of(key.tensor_scheme, key.tensor.size),
        precision=key.precision,  # pyright: ignore[reportArgumentType]
        wide=wide,
        gradient_bytes=key.gradient_bytes,
    )


def grid_of(scheme: str, ranks: int) -> tuple[int, int, int] | None:
    """How often M, N and K of a product are cut under a multi-dimensional split; None: one dimension."""
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
    """Depth and side of ranks = depth · side²: the largest side that is at least the depth."""
    for side in range(math.isqrt(ranks), 0, -1):
        if ranks % (side * side) == 0:
            return ranks // (side * side), side
    return ranks, 1


def _parameters(block: Block, share: Share) -> tuple[float, float]:
    dense = expert = 0.0
    for operator in block.operators:
        if operator.split == "expert":
            expert += operator.parameters / min(share.expert, operator.groups or 1)
        elif operator.split in ("replicate", "sequence"):
            dense += operator.parameters
        else:
            dense += operator.parameters / share.tensor
    return dense, expert


def _kept_bytes(block: Block, share: Share) -> float:
    kept = 0.0
    for operator in block.operators:
        split = operator.split not in ("replicate", "sequence") or share.sequence_parallel
        size = operator.kept_elements_per_token * share.element_bytes + operator.kept_bytes_per_token
        kept += size * share.tokens / (share.tensor if split else 1)
    return kept


class _Sent:
    """What a block's operators send, forward and backward: the exposed seconds."""

    def __init__(self, block: Block, share: Share, key: CostKey, seconds: Seconds, device: Device) -> None:
        self._block, self._share, self._key = block, share, key
        self._seconds, self._device = seconds, device

    def over(self, axis: str, works: Works) -> tuple[float, float]:
        """What is sent over one axis."""
        find = {"tensor": self.tensor, "context": self.context, "expert": self.expert, "statistics": self.statistics}
        return find[axis](works)

    def statistics(self, works: Works) -> tuple[float, float]:
        """Batch norms over data ranks: mean, squares and count of each rank forward, two sums backward, all in fp32."""
        group = self._key.statistics
        forward = backward = 0.0
        for operator, _ in works:
            if group is not None and operator.batch_statistics:
                numbers = 2 * operator.batch_statistics
                forward += self._seconds("all_gather", 4.0 * (numbers + 1) * group.size, group)
                backward += self._seconds("all_reduce", 4.0 * numbers, group)
        return forward, backward

    def tensor(self, works: Works) -> tuple[float, float]:
        """Sums or their halves around the products that the tensor axis splits."""
        share, group = self._share, self._key.tensor
        if group.size == 1:
            return 0.0, 0.0
        if share.grid is not None:
            return self._tensor_grid(share.grid)
        forward = backward = 0.0
        for operator in self._block.operators:
            rows = share.tokens * operator.rows_per_token * share.element_bytes
            if operator.split == "row":
                once = self._sum(rows * operator.n)
                forward, backward = forward + once, backward + once
            elif operator.split == "vocab" and operator.kind == "gather":
                size = share.tokens * self._block_width(operator) * share.element_bytes
                forward += self._reduce(size)
                backward += self._gather(size)
            elif operator.split == "vocab" and operator.kind == "matmul":
                forward += self._gather(rows * operator.k)
                backward += self._reduce(rows * operator.k)
        stack, calibration = self._device.stack, self._device.calibration
        if stack.overlap_tensor:
            exposed = 1.0 - calibration.tensor_overlap_share
            return forward * exposed, backward * exposed
        if stack.overlap_tensor_backward:
            # Sums hide beside the products for the weights; what sequence parallelism gathers comes before them.
            weight_seconds = sum(work.weight.seconds for operator, work in works if operator.split != "expert")
            sums = backward * (0.5 if share.sequence_parallel else 1.0)
            backward -= min(sums, calibration.overlap_share * weight_seconds)
        return forward, backward

    def _block_width(self, operator: Operator) -> float:
        return operator.n or operator.elements_moved_per_token / 2

    def _sum(self, size_bytes: float) -> float:
        """An all-reduce, or with sequence parallelism its two halves."""
        if self._share.sequence_parallel:
            group = self._key.tensor
            return self._seconds("reduce_scatter", size_bytes, group) + self._seconds("all_gather", size_bytes, group)
        return self._seconds("all_reduce", size_bytes, self._key.tensor)

    def _reduce(self, size_bytes: float) -> float:
        kind: Collective = "reduce_scatter" if self._share.sequence_parallel else "all_reduce"
        return self._seconds(kind, size_bytes, self._key.tensor)

    def _gather(self, size_bytes: float) -> float:
        return self._seconds("all_gather", size_bytes, self._key.tensor) if self._share.sequence_parallel else 0.0

    def _tensor_grid(self, grid: tuple[int, int, int]) -> tuple[float, float]:
        """Gathered rows, columns and inner parts of every product, over lines of the grid.

        Sources: SUMMA (van de Geijn and Watts 1997), Xu et al. 2021 (arXiv 2104.05343), Wang et al. 2021 (2.5-D, arXiv
        2105.14500), Bian et al. 2021 (3-D, arXiv 2105.14450).
        """
        share = self._share
        side, ranks = grid[1], share.tensor
        line = (1 - 1 / side) / (1 - 1 / ranks)
        forward = backward = 0.0
        for operator in self._block.operators:
            if operator.kind not in ("matmul", "convolution") or operator.split in ("replicate", "expert", "sequence"):
                continue
            m, n, k = share.tokens * operator.rows_per_token, operator.n, operator.k
            rows, columns, inner = grid
            if inner > 1:
                pieces = (m * k / (rows * inner), k * n / (columns * inner), m * n / (rows * columns))
            else:
                pieces = (m * k / rows, k * n / columns, 0.0)
            sizes = [piece * share.element_bytes for piece in pieces]
            # A line of the grid is `side` of the ranks; its gather over all of them costs (side−1)/side of (n−1)/n.
            once = sum(self._seconds("all_gather", size, self._key.tensor) for size in sizes) * line
            forward += once
            backward += 2.0 * once
        return forward, backward

    def context(self, works: Works) -> tuple[float, float]:
        """Keys and values travel round the ring beside the attention, or are gathered; or heads change places."""
        share, group = self._share, self._key.context
        forward = backward = 0.0
        if group.size == 1:
            return 0.0, 0.0
        for operator, work in works:
            if operator.kind != "attention":
                continue
            heads = max(1.0, operator.kv_heads / share.tensor) * (operator.head_size + operator.value_head_size)
            keys = share.tokens * heads * share.element_bytes
            if self._key.context_scheme == "ring":
                beside = self._device.calibration.overlap_share / group.size
                steps = group.size - 1
                sent = self._seconds("send", keys, group)
                forward += steps * max(0.0, sent - beside * work.forward.seconds)
                backward += steps * max(0.0, 2.0 * sent - beside * work.input.seconds)
            elif self._key.context_scheme == "all_gather":
                whole = keys * group.size
                forward += self._seconds("all_gather", whole, group)
                backward += self._seconds("reduce_scatter", whole, group)
            else:
                queries = operator.heads / share.tensor * (operator.head_size + operator.value_head_size)
                swapped = keys + share.tokens * queries * share.element_bytes
                once = self._seconds("all_to_all", swapped, group)
                forward, backward = forward + once, backward + once
        return forward, backward

    def expert(self, works: Works) -> tuple[float, float]:
        """Tokens travel to their experts and back, in both passes."""
        share, group = self._share, self._key.expert
        experts = [operator for operator in self._block.operators if operator.split == "expert" and operator.n]
        if group.size == 1 or not experts:
            return 0.0, 0.0
        first, last = experts[0], experts[-1]
        rows = share.tokens * share.element_bytes / share.tensor
        once = self._travel(rows * first.k, first.rows_per_token) + self._travel(rows * last.n, last.rows_per_token)
        if self._device.stack.overlap_expert:
            beside = self._device.calibration.overlap_share * sum(work.forward.seconds for _, work in works)
            return max(0.1 * once, once - beside), max(0.1 * once, once - 2.0 * beside)
        return once, once

    def _travel(self, size_bytes: float, copies: float) -> float:
        """Tokens of `size_bytes` go to `copies` experts each."""
        group = self._key.expert
        seconds = self._seconds("all_to_all", size_bytes * copies, group)
        if not self._device.stack.sends_tokens_once or len(group.legs) < 2:
            return seconds
        inner = group.legs[0]
        nodes = group.size / inner.units
        # Of `copies` experts drawn at random, so many lie on different nodes.
        distinct = nodes * (1.0 - (1.0 - 1.0 / nodes) ** copies)
        within = size_bytes * copies * (inner.units - 1) / inner.units / inner.bandwidth
        return max(seconds * distinct / copies, within)


def key_of(layout: Layout, groups: Groups, *, has_batch_norm: bool) -> CostKey:
    """Return what block costs depend on under a layout."""
    return CostKey(
        samples=layout.microbatch_size,
        sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        tensor_scheme=layout.tensor_scheme,
        context_scheme=layout.context_scheme,
        precision=layout.precision,
        gradient_bytes=layout.gradient_bytes,
        tensor=groups.tensor,
        context=groups.context,
        expert=groups.expert,
        statistics=groups.data if has_batch_norm and groups.data.size > 1 else None,
    )
