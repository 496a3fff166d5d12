"""Costs that all layouts with the same microbatch on the same tensor, context and expert axes have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from weft.config.plan import Axis, Recompute
from weft.model.profile import Block
from weft.planning.price import BlockCost, CostModel, memory_key
from weft.planning.search._bounds import Floats
from weft.planning.search._space import Space
from weft.planning.search._splits import Bools, CandidateTable, Ints
from weft.planning.search._variants import StageVariant
from weft.techniques.cost_terms import Layout


class PassSeconds(NamedTuple):
    """Seconds of one microbatch in all blocks, stem and tail, on one rank that has them all; by case."""

    forward: Floats
    input: Floats
    """Gradients of inputs, with what is computed again."""
    weight: Floats
    least_block: Floats
    """All three passes of the cheapest block."""
    block: Floats
    """All three passes of a block in the mean."""
    block_forward: Floats
    """Mean over blocks, as is `block_input`."""
    block_input: Floats
    stem: Floats
    tail: Floats

    @property
    def alike(self) -> Bools:
        """Whether all blocks cost the same."""
        return self.least_block >= self.block * (1.0 - 1e-12)

    @property
    def block_weight(self) -> Floats:
        return self.block - self.block_forward - self.block_input

    @property
    def all_blocks(self) -> Floats:
        return self.forward + self.input + self.weight


class HeldBytes(NamedTuple):
    """Bytes of one microbatch that one rank keeps, by case."""

    kept: Floats
    """Bytes of all blocks."""
    least: Floats
    """Bytes of the block that keeps least."""
    live: Floats
    """Bytes that exist besides during a block's backward."""
    stem: Floats
    tail: Floats


class WeightElements(NamedTuple):
    """Elements of one rank's weights."""

    dense: float
    """Elements of all blocks, experts left out."""
    experts: float
    stem: float
    tail: float
    widest: float
    """Elements of the largest block, experts included."""
    least_dense: float
    """Elements of the block that has fewest, as are `least_experts`."""
    least_experts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCosts(CandidateTable):
    """Costs of one microbatch size on one (tensor, context, expert), in several cases: schemes, and arrangements of the
    axes on the hardware."""

    bases: tuple[Layout, ...]
    """A layout of each case."""
    inside: Ints
    """`StageVariant.inside`, by row."""
    lent: Ints
    """`StageVariant.lent`, by row."""
    case: Ints
    """Case of each row; the figures below are by row."""
    passes: dict[Recompute, PassSeconds]
    held: dict[Recompute, HeldBytes]
    weights: WeightElements
    """Weights of all cases."""
    hop: Floats
    """Seconds from a stage to the next, on the links that are best for it."""
    logits: Floats
    """Bytes around the loss."""
    moved: Floats
    """Bytes of one microbatch that offloading activations moves, of all blocks."""


Counted = Sequence[tuple[Block, int]]
"""Each kind of block, and how many there are."""


def group_costs(cost_model: CostModel, space: Space, counted: Counted, cases: Sequence[StageVariant]) -> GroupCosts:
    """Return the costs of a group of splits in each of its cases."""
    profile, bases = cost_model.profile, [case.layout for case in cases]
    passes: dict[Recompute, list[tuple[float, ...]]] = {word: [] for word in space.recomputes}
    held: dict[Recompute, list[tuple[float, ...]]] = {word: [] for word in space.recomputes}
    moved: list[float] = []
    # Blocks of a model are few kinds: costs are computed once for each and multiplied by their number.
    for base in bases:
        costs = [(cost_model.block_cost(block, base), count) for block, count in counted]
        ends = [cost_model.block_cost(end, base) for end in (profile.stem, profile.tail)]
        moved.append(sum(cost.kept_bytes * count for cost, count in costs))
        for word in space.recomputes:
            passes[word].append(_passes(costs, ends, word))
            held[word].append(_held(cost_model, base, counted, word))
    costs = [(cost_model.block_cost(block, bases[0]), count) for block, count in counted]
    return GroupCosts(
        bases=tuple(bases),
        inside=np.array([case.inside for case in cases]),
        lent=np.array([case.lent for case in cases]),
        case=np.arange(len(bases)),
        passes={word: PassSeconds(*map(np.array, zip(*found, strict=True))) for word, found in passes.items()},
        held={word: HeldBytes(*map(np.array, zip(*found, strict=True))) for word, found in held.items()},
        weights=WeightElements(
            dense=sum(cost.dense_parameters * count for cost, count in costs),
            experts=sum(cost.expert_parameters * count for cost, count in costs),
            stem=cost_model.block_cost(profile.stem, bases[0]).dense_parameters,
            tail=cost_model.block_cost(profile.tail, bases[0]).dense_parameters,
            widest=max(cost.dense_parameters + cost.expert_parameters for cost, _ in costs),
            least_dense=min(cost.dense_parameters for cost, _ in costs),
            least_experts=min(cost.expert_parameters for cost, _ in costs),
        ),
        hop=np.array([_hop(cost_model, base) for base in bases]),
        moved=np.array(moved),
        logits=np.array([_logits(cost_model, space, base) for base in bases]),
    )


def _logits(cost_model: CostModel, space: Space, base: Layout) -> float:
    return min(cost_model.memories.logits(replace(base, fused_loss=fused)) for fused in space.fused_losses)


_PARTS = (attrgetter("forward"), attrgetter("input"), attrgetter("weight"))


def _passes(costs: list[tuple[BlockCost, int]], ends: list[BlockCost], word: Recompute) -> tuple[float, ...]:
    number = sum(count for _, count in costs)
    forward = sum(cost.forward.seconds * count for cost, count in costs)
    inputs = sum((cost.input.seconds + cost.again(word).seconds) * count for cost, count in costs)
    weight = sum(cost.weight.seconds * count for cost, count in costs)
    least = min(_seconds(cost) + cost.again(word).seconds for cost, _ in costs)
    # Means over blocks before stem and tail are added.
    means = ((forward + inputs + weight) / number, forward / number, inputs / number)
    forward, inputs, weight = (
        blocks + sum(part(end).seconds for end in ends)
        for blocks, part in zip((forward, inputs, weight), _PARTS, strict=True)
    )
    return forward, inputs, weight, least, *means, *map(_seconds, ends)


def _seconds(cost: BlockCost) -> float:
    return cost.forward.seconds + cost.input.seconds + cost.weight.seconds


def _held(cost_model: CostModel, base: Layout, counted: Counted, word: Recompute) -> tuple[float, ...]:
    key, blocks = memory_key(base), cost_model.memories.blocks
    memories = [(blocks.memory(block, key, word), count) for block, count in counted]
    stem, tail = (blocks.memory(end, key).kept_bytes for end in (cost_model.profile.stem, cost_model.profile.tail))
    kept = sum(memory.kept_bytes * count for memory, count in memories)
    least = min(memory.kept_bytes for memory, _ in memories)
    return kept, least, min(memory.live_bytes for memory, _ in memories), stem, tail


def _hop(cost_model: CostModel, base: Layout) -> float:
    """Seconds of sending one microbatch's activation to the next stage, over the innermost or the outermost links."""
    if 2 * base.world_size > cost_model.cluster.num_devices:
        return 0.0
    others: tuple[Axis, ...] = tuple(axis for axis in base.order if axis != "pipeline")
    orders: tuple[tuple[Axis, ...], ...] = (("pipeline", *others), (*others, "pipeline"))
    pairs = [cost_model.groups(replace(base, pipeline=2, order=order)).pipeline for order in orders]
    return min(cost_model.transfer(base, pair) for pair in pairs)
