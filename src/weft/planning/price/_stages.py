"""Cost of one microbatch in each block, and in the stages that blocks make up."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from weft.config.plan import Recompute
from weft.model.profile import Block, Operator, Profile
from weft.planning.price._block_factors import BlockFit, block_fit
from weft.techniques.context.cost import context_traffic
from weft.techniques.cost_terms import (
    BoundedCache,
    CostKey,
    Device,
    Groups,
    Layout,
    OperatorWork,
    PassCost,
    Seconds,
    Sender,
    Share,
    Work,
    Works,
    operator_work,
)
from weft.techniques.data.cost import statistics_traffic
from weft.techniques.expert.cost import expert_traffic
from weft.techniques.recompute.cost import computed_again
from weft.techniques.tensor.cost import grid_of, tensor_traffic


class BlockCost(NamedTuple):
    """One microbatch in one block on one rank."""

    forward: PassCost
    input: PassCost
    """Backward as far as the gradient of the block's input."""
    weight: PassCost
    """The rest of backward."""
    selective: PassCost
    """Cost of the operators that `recompute = "selective"` computes again."""
    dense_parameters: float
    """Elements of the weights that one rank of the tensor axis has, experts left out."""
    expert_parameters: float
    """Elements of one expert rank's experts."""
    kept_bytes: float
    """Activations of one microbatch that wait for its backward."""

    def again(self, recompute: Recompute) -> PassCost:
        """Return the cost of what is computed again before the backward."""
        return computed_again(recompute, PassCost(), self.selective, self.forward)


class _BlockWork(NamedTuple):
    """A block on one rank with nothing sent."""

    works: Works
    alone: BlockCost


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
        cost = self._costs.get((id(block), key))
        if cost is None:
            cost = self._costs[id(block), key] = self._price(block, key)
        return cost

    def sums(self, key: CostKey) -> tuple[float, float]:
        """Return the seconds of one microbatch in all blocks but stem and tail, and what of it is computing.

        Half a million arrangements of axes differ in a few groups, so what each axis sends is summed by its group.
        """
        share = share_of(self._profile, key)
        # Equal keys, one object: comparing it with itself is quick, and a search holds very many keys.
        share = self._shares.setdefault(share, share)  # half a million keys hold one object each
        computing = self._sums.get((share,))
        if computing is None:
            costs = [(self._known_work(block, share).alone, count) for block, count in self._counted]
            computing = self._sums[(share,)] = sum(
                count * part.compute for cost, count in costs for part in (cost.forward, cost.input, cost.weight)
            )
        whole = computing
        for place, (_, group) in enumerate(_TRAFFIC):
            # Traffic over one axis depends on this rank's share and on that axis's group alone.
            index = (share, place, group(key))
            if index not in self._sums:
                self._sums[index] = sum(
                    count * sum(self._sent(block, share, key, place)) for block, count in self._counted
                )
            whole += self._sums[index]
        return whole, computing

    def _price(self, block: Block, key: CostKey) -> BlockCost:
        # Stem and tail have products as wide as the vocabulary, whose measured speed is another.
        share = share_of(self._profile, key, wide=block is self._profile.stem or block is self._profile.tail)
        alone = self._known_work(block, share).alone
        parts = [self._part(block, share, key, place) for place in range(len(_TRAFFIC))]
        forward, backward = zip(*parts, strict=True)
        return alone._replace(
            forward=PassCost(*alone.forward[:_COMPUTED], *forward), input=PassCost(*alone.input[:_COMPUTED], *backward)
        )

    def _known_work(self, block: Block, share: Share) -> _BlockWork:
        index = (id(block), share)
        if index not in self._works:
            self._works[index] = self._work(block, share)
        return self._works[index]

    def _part(self, block: Block, share: Share, key: CostKey, place: int) -> tuple[float, float]:
        """Exposed seconds, forward and backward, of what a block sends over one axis; known by the axis's group."""
        index = (id(block), share, place, _TRAFFIC[place][1](key))
        if index not in self._parts:
            self._parts[index] = self._sent(block, share, key, place)
        return self._parts[index]

    def _sent(self, block: Block, share: Share, key: CostKey, place: int) -> tuple[float, float]:
        works = self._known_work(block, share).works
        return _TRAFFIC[place][0](Sender(works, share, key, self._seconds, self._device))

    def _work(self, block: Block, share: Share) -> _BlockWork:
        """Return the work of a rank in a block, which does not depend on where its groups lie."""
        is_even = share.expert == 1 or self._device.framework.balances_experts
        # The fullest expert decides how long all wait; a rank with all experts has all tokens whatever the routing.
        imbalance = 1.0 if is_even else self._device.calibration.expert_imbalance
        works = [(operator, operator_work(self._device, operator, share, imbalance)) for operator in block.operators]
        if self._device.speeds:
            fit = self._fit(share.precision)
            works = [
                (operator, self._accumulated(operator, fit.of(operator, work, inside=not share.wide), share))
                for operator, work in works
            ]
        correction = self._device.correction(share.precision)
        works = [(operator, work.corrected(correction, operator.kind)) for operator, work in works]
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
        # The gradient is read and written (2.0 ·) where it is added; a table's is cleared besides.
        parts = share.expert * share.expert_tensor if operator.split == "expert" else share.tensor
        once = share.element_bytes * (2.0 if operator.kind == "gather" else 1.0) + 2.0 * share.gradient_bytes
        size = elements / (1 if operator.split in ("replicate", "sequence") else parts) * once
        return work._replace(weight=work.weight.plus(self._device.moved(size)))

    def _fit(self, precision: str) -> BlockFit:
        """Return the factors of measured blocks over the sum of their operators."""
        if precision not in self._fits:
            self._fits[precision] = block_fit(self._device, precision)
        return self._fits[precision]

    def _pass(self, works: list[Work]) -> PassCost:
        """Add up kernels; where the host issues them more slowly than they run, the difference is lost to shapes."""
        ideal, shapes, memory, kernels = (sum(column) for column in zip(*works, strict=True)) if works else (0.0,) * 4
        # Kernels are issued ahead of the device, so issuing costs only what is longer than running.
        waiting = max(0.0, kernels * self._device.host_seconds - (ideal + shapes + memory))
        return PassCost(ideal=ideal, shapes=shapes + waiting, memory=memory)


_COMPUTED = 3
"""Fields of a `PassCost` that are computing; the others are what `_TRAFFIC` sends, in its order."""


_TRAFFIC = (
    (tensor_traffic, attrgetter("tensor")),
    (context_traffic, attrgetter("context", "context_scheme", "context_ulysses")),
    (expert_traffic, attrgetter("expert", "expert_exchange")),
    (statistics_traffic, attrgetter("statistics")),
)
"""Traffic of blocks, in the order of a `PassCost`'s fields, each with the fields of a `CostKey` that decide its time
beside a rank's share."""


def share_of(profile: Profile, key: CostKey, *, wide: bool = False) -> Share:
    """Return what one rank has of the work."""
    return Share(
        samples=key.samples,
        sequence=profile.sequence_length,
        tensor=key.tensor.size,
        context=key.context.size,
        expert=key.expert.size,
        expert_tensor=key.expert_tensor,
        sequence_parallel=key.sequence_parallel,
        grid=grid_of(key.tensor_scheme, key.tensor.size),
        precision=key.precision,  # pyright: ignore[reportArgumentType]
        wide=wide,
        gradient_bytes=key.gradient_bytes,
    )


def _parameters(block: Block, share: Share) -> tuple[float, float]:
    dense = expert = 0.0
    for operator in block.operators:
        if operator.split == "expert":
            # An expert axis cannot divide a layer further than into single experts.
            expert += operator.parameters / min(share.expert, operator.groups or 1) / share.expert_tensor
        elif operator.split in ("replicate", "sequence"):
            dense += operator.parameters
        else:
            dense += operator.parameters / share.tensor
    return dense, expert


def _kept_bytes(block: Block, share: Share) -> float:
    kept = 0.0
    for operator in block.operators:
        # Tensor ranks keep a part of an activation where the operator works on a part: inside split layers always, on
        # norms and residuals only if they share the sequence.
        split = operator.split not in ("replicate", "sequence") or share.sequence_parallel
        # Rows that travel to experts are the same on all tensor ranks of an expert: every one keeps them whole.
        split &= not (operator.moves_experts_rows and share.expert_tensor > 1)
        size = operator.kept_elements_per_token * share.element_bytes + operator.kept_bytes_per_token
        kept += size * share.tokens / (share.tensor if split else 1)
    return kept


def key_of(layout: Layout, groups: Groups, *, has_batch_norm: bool) -> CostKey:
    """Return what block costs depend on under a layout."""
    return CostKey(
        samples=layout.microbatch_size,
        sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        tensor_scheme=layout.tensor_scheme,
        context_scheme=layout.context_scheme,
        context_ulysses=layout.context_ulysses,
        expert_exchange=layout.expert_exchange,
        expert_tensor=layout.expert_tensor,
        precision=layout.precision,
        gradient_bytes=layout.gradient_bytes,
        tensor=groups.tensor,
        context=groups.context,
        expert=groups.expert,
        statistics=groups.data if has_batch_norm and groups.data.size > 1 else None,
    )
