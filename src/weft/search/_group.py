"""What all layouts with the same microbatch on the same tensor, context and expert axes have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.plan import Recompute
from weft.price import BlockCost, Layout, Pricer, memory_key
from weft.profile import Block, Profile
from weft.search._space import Space


class Passes(NamedTuple):
    """Seconds of one microbatch in all blocks, stem and tail, on one rank that has them all."""

    forward: float
    input: float
    """Gradients of inputs, with what is computed again."""
    weight: float
    least_block: float
    """All three passes of the cheapest block."""

    @property
    def whole(self) -> float:
        return self.forward + self.input + self.weight


class Held(NamedTuple):
    """Bytes of one microbatch that one rank keeps."""

    kept: float
    """Of all blocks."""
    live: float
    """Besides, during a block's backward."""
    stem: float
    tail: float


class Weights(NamedTuple):
    """Elements of one rank's weights."""

    dense: float
    """Of all blocks, experts left out."""
    experts: float
    stem: float
    tail: float
    widest: float
    """Of the largest block, experts included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCosts:
    """Of one microbatch size on one (tensor, context, expert)."""

    base: Layout
    """One of them."""
    passes: dict[Recompute, Passes]
    held: dict[Recompute, Held]
    weights: Weights
    hop: float
    """Seconds from a stage to the next."""
    logits: float
    """Bytes around the loss."""


def blocks_seconds(pricer: Pricer, base: Layout) -> float:
    """Return the seconds of one microbatch in all blocks with nothing computed again: what a group takes at least."""
    costs = ((pricer.block_cost(block, base), count) for block, count in count_blocks(pricer.profile))
    return sum(count * (cost.forward.seconds + cost.input.seconds + cost.weight.seconds) for cost, count in costs)


def group_costs(pricer: Pricer, space: Space, base: Layout) -> GroupCosts:
    """Return the costs of a group of splits; `base` is one of them."""
    profile = pricer.profile
    counted = count_blocks(profile)
    costs = [(pricer.block_cost(block, base), count) for block, count in counted]
    ends = [pricer.block_cost(end, base) for end in (profile.stem, profile.tail)]
    widest = max(each.dense_parameters + each.expert_parameters for each, _ in costs)
    return GroupCosts(
        base=base,
        passes={word: _passes(costs, ends, word) for word in space.recomputes},
        held={word: _held(pricer, base, counted, word) for word in space.recomputes},
        weights=Weights(
            dense=sum(each.dense_parameters * count for each, count in costs),
            experts=sum(each.expert_parameters * count for each, count in costs),
            stem=ends[0].dense_parameters,
            tail=ends[1].dense_parameters,
            widest=widest,
        ),
        hop=_hop(pricer, base),
        logits=pricer.memories.logits(base),
    )


def count_blocks(profile: Profile) -> list[tuple[Block, int]]:
    """Return each kind of block once, with how many there are; alike blocks are the same object."""
    counts: dict[int, tuple[Block, int]] = {}
    for block in profile.blocks:
        counts[id(block)] = (block, counts.get(id(block), (block, 0))[1] + 1)
    return list(counts.values())


def _passes(costs: list[tuple[BlockCost, int]], ends: list[BlockCost], word: Recompute) -> Passes:
    forward = sum(cost.forward.seconds * count for cost, count in costs) + sum(end.forward.seconds for end in ends)
    inputs = sum((cost.input.seconds + cost.again(word).seconds) * count for cost, count in costs)
    weight = sum(cost.weight.seconds * count for cost, count in costs) + sum(end.weight.seconds for end in ends)
    least = min(
        cost.forward.seconds + cost.input.seconds + cost.again(word).seconds + cost.weight.seconds for cost, _ in costs
    )
    return Passes(forward, inputs + sum(end.input.seconds for end in ends), weight, least)


def _held(pricer: Pricer, base: Layout, counted: list[tuple[Block, int]], word: Recompute) -> Held:
    key, blocks = memory_key(base), pricer.memories.blocks
    found = [(blocks.memory(block, key, word), count) for block, count in counted]
    stem, tail = (blocks.memory(end, key).kept_bytes for end in (pricer.profile.stem, pricer.profile.tail))
    kept = sum(each.kept_bytes * count for each, count in found)
    return Held(kept, max(each.live_bytes for each, _ in found), stem, tail)


def _hop(pricer: Pricer, base: Layout) -> float:
    """Seconds of sending one microbatch's activation to the next stage, over the outermost links."""
    if base.pipeline == 1:
        return 0.0
    profile = pricer.profile
    tokens = base.microbatch_size * profile.sequence_length / base.context
    element = {"fp64": 8, "fp32": 4, "tf32": 4}.get(base.precision, 2)
    size = tokens * profile.blocks[0].entry_elements_per_token * element
    size /= base.tensor if base.sequence_parallel else 1
    return pricer.seconds("send", size, pricer.groups(base).pipeline)
