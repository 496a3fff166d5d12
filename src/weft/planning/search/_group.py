"""What all layouts with the same microbatch on the same tensor, context and expert axes have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from weft.config.plan import Axis, Recompute
from weft.model.profile import Block
from weft.planning.price import BlockCost, Pricer, memory_key
from weft.planning.search._bounds import Floats
from weft.planning.search._space import Space
from weft.planning.search._splits import Bools, Ints, Table
from weft.planning.search._variants import StageVariant
from weft.techniques.cost_terms import Layout


class Passes(NamedTuple):
    """Seconds of one microbatch in all blocks, stem and tail, on one rank that has them all; by case."""

    forward: Floats
    input: Floats
    """Gradients of inputs, with what is computed again."""
    weight: Floats
    least_block: Floats
    """All three passes of the cheapest block."""
    block: Floats
    """The same, of blocks in the mean."""
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
    def whole(self) -> Floats:
        return self.forward + self.input + self.weight


class HeldBytes(NamedTuple):
    """Bytes of one microbatch that one rank keeps, by case."""

    kept: Floats
    """Bytes of all blocks."""
    least: Floats
    """Bytes of the block that keeps least."""
    live: Floats
    """Besides, during a block's backward."""
    stem: Floats
    tail: Floats


class Weights(NamedTuple):
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
class GroupCosts(Table):
    """Of one microbatch size on one (tensor, context, expert), in several cases: schemes, and arrangements of the axes
    on the hardware."""

    bases: tuple[Layout, ...]
    """A layout of each case."""
    inside: Ints
    """`StageVariant.inside`, by row."""
    lent: Ints
    """`StageVariant.lent`, by row."""
    case: Ints
    """Case of each row; the figures below are by row."""
    passes: dict[Recompute, Passes]
    held: dict[Recompute, HeldBytes]
    weights: Weights
    """Weights of all cases."""
    hop: Floats
    """Seconds from a stage to the next, on the links that are best for it."""
    logits: Floats
    """Bytes around the loss."""
    moved: Floats
    """Bytes of one microbatch that offloading activations moves, of all blocks."""


Counted = Sequence[tuple[Block, int]]
"""Each kind of block, and how many there are."""


def group_costs(pricer: Pricer, space: Space, counted: Counted, cases: Sequence[StageVariant]) -> GroupCosts:
    """Return the costs of a group of splits in each of its cases."""
    profile, bases = pricer.profile, [case.layout for case in cases]
    passes: dict[Recompute, list[tuple[float, ...]]] = {word: [] for word in space.recomputes}
    held: dict[Recompute, list[tuple[float, ...]]] = {word: [] for word in space.recomputes}
    moved: list[float] = []
    for base in bases:
        costs = [(pricer.block_cost(block, base), count) for block, count in counted]
        ends = [pricer.block_cost(end, base) for end in (profile.stem, profile.tail)]
        moved.append(sum(each.kept_bytes * count for each, count in costs))
        for word in space.recomputes:
            passes[word].append(_passes(costs, ends, word))
            held[word].append(_held(pricer, base, counted, word))
    costs = [(pricer.block_cost(block, bases[0]), count) for block, count in counted]
    return GroupCosts(
        bases=tuple(bases),
        inside=np.array([case.inside for case in cases]),
        lent=np.array([case.lent for case in cases]),
        case=np.arange(len(bases)),
        passes={word: Passes(*map(np.array, zip(*found, strict=True))) for word, found in passes.items()},
        held={word: HeldBytes(*map(np.array, zip(*found, strict=True))) for word, found in held.items()},
        weights=Weights(
            dense=sum(each.dense_parameters * count for each, count in costs),
            experts=sum(each.expert_parameters * count for each, count in costs),
            stem=pricer.block_cost(profile.stem, bases[0]).dense_parameters,
            tail=pricer.block_cost(profile.tail, bases[0]).dense_parameters,
            widest=max(each.dense_parameters + each.expert_parameters for each, _ in costs),
            least_dense=min(each.dense_parameters for each, _ in costs),
            least_experts=min(each.expert_parameters for each, _ in costs),
        ),
        hop=np.array([_hop(pricer, base) for base in bases]),
        moved=np.array(moved),
        logits=np.array([_logits(pricer, space, base) for base in bases]),
    )


def _logits(pricer: Pricer, space: Space, base: Layout) -> float:
    return min(pricer.memories.logits(replace(base, fused_loss=fused)) for fused in space.fused_losses)


_PARTS = (attrgetter("forward"), attrgetter("input"), attrgetter("weight"))


def _passes(costs: list[tuple[BlockCost, int]], ends: list[BlockCost], word: Recompute) -> tuple[float, ...]:
    number = sum(count for _, count in costs)
    forward = sum(cost.forward.seconds * count for cost, count in costs)
    inputs = sum((cost.input.seconds + cost.again(word).seconds) * count for cost, count in costs)
    weight = sum(cost.weight.seconds * count for cost, count in costs)
    least = min(_seconds(cost) + cost.again(word).seconds for cost, _ in costs)
    means = ((forward + inputs + weight) / number, forward / number, inputs / number)
    forward, inputs, weight = (
        blocks + sum(part(end).seconds for end in ends)
        for blocks, part in zip((forward, inputs, weight), _PARTS, strict=True)
    )
    return forward, inputs, weight, least, *means, *map(_seconds, ends)


def _seconds(cost: BlockCost) -> float:
    return cost.forward.seconds + cost.input.seconds + cost.weight.seconds


def _held(pricer: Pricer, base: Layout, counted: Counted, word: Recompute) -> tuple[float, ...]:
    key, blocks = memory_key(base), pricer.memories.blocks
    found = [(blocks.memory(block, key, word), count) for block, count in counted]
    stem, tail = (blocks.memory(end, key).kept_bytes for end in (pricer.profile.stem, pricer.profile.tail))
    kept = sum(each.kept_bytes * count for each, count in found)
    least = min(each.kept_bytes for each, _ in found)
    return kept, least, min(each.live_bytes for each, _ in found), stem, tail


def _hop(pricer: Pricer, base: Layout) -> float:
    """Seconds of sending one microbatch's activation to the next stage, over the innermost or the outermost links."""
    if 2 * base.world_size > pricer.cluster.num_devices:
        return 0.0
    others: tuple[Axis, ...] = tuple(axis for axis in base.order if axis != "pipeline")
    orders: tuple[tuple[Axis, ...], ...] = (("pipeline", *others), (*others, "pipeline"))
    pairs = [pricer.groups(replace(base, pipeline=2, order=order)).pipeline for order in orders]
    return min(pricer.transfer(base, pair) for pair in pairs)
