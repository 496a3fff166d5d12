"""A model's blocks under one split: sums over runs of blocks, so that any cut into stages is priced by subtraction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from weft.config.plan import Recompute, balanced_cuts
from weft.model.profile import Block, Profile
from weft.planning.price._stages import BlockCost
from weft.techniques.cost_terms import Layout, PassCost


class Stages(NamedTuple):
    """One microbatch in every stage, and what each stage holds."""

    forward: list[float]
    input: list[float]
    """Backward up to the input's gradient, what is computed again included."""
    weight: list[float]
    dense_parameters: list[float]
    expert_parameters: list[float]
    kept_bytes: list[float]
    """Kept by blocks, not by stem and tail."""


class ModelCost:
    """Costs of stem, blocks and tail under one split; `costs` are theirs in this order."""

    def __init__(self, costs: Sequence[BlockCost], recompute: Sequence[Recompute], *, weights: bool) -> None:
        """`weights`: whether weights get gradients."""
        kinds: list[Recompute] = ["none", *recompute, "none"]
        pairs = list(zip(costs, kinds, strict=True))
        again_of: dict[tuple[int, Recompute], PassCost] = {}
        for cost, kind in pairs:
            if (id(cost), kind) not in again_of:  # alike blocks are one object
                again_of[id(cost), kind] = cost.again(kind)
        again = [again_of[id(cost), kind] for cost, kind in pairs]
        self.sums = _total(costs, again, weights=weights)
        """PassCost sums of a whole microbatch: of the passes, and of what is computed again."""
        self._tables = Stages(
            _before(cost.forward.seconds for cost in costs),
            _before(cost.input.seconds + more.seconds for cost, more in zip(costs, again, strict=True)),
            _before((cost.weight.seconds if weights else 0.0) for cost in costs),
            _before(cost.dense_parameters for cost in costs),
            _before(cost.expert_parameters for cost in costs),
            _before([0.0, *(cost.kept_bytes for cost in costs[1:-1]), 0.0]),
        )
        forward, inputs, weight = self._tables[:3]
        ends = [sum(values) for values in zip(forward, inputs, weight, strict=True)]
        self._seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)]
        self._balanced: dict[int, tuple[int, ...]] = {}
        self._stages: dict[tuple[int, ...], Stages] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._seconds) - 2

    def cuts(self, layout: Layout) -> tuple[int, ...]:
        """Return the layout's cuts, or those by cost."""
        if layout.cuts is not None:
            return layout.cuts
        if layout.num_stages not in self._balanced:
            self._balanced[layout.num_stages] = balanced_cuts(self._seconds, layout.num_stages)
        return self._balanced[layout.num_stages]

    def stages(self, cuts: tuple[int, ...]) -> Stages:
        """Return the stages that begin at block 0 and at the cuts; stem and tail belong to the ends."""
        if cuts not in self._stages:
            starts = [0, *(cut + 1 for cut in cuts)]
            ends = [*starts[1:], self.num_blocks + 2]
            self._stages[cuts] = Stages(
                *(
                    [table[end] - table[start] for start, end in zip(starts, ends, strict=True)]
                    for table in self._tables
                )
            )
        return self._stages[cuts]


def model_cost_of(profile: Profile, layout: Layout, cost_of: Callable[[Block], BlockCost]) -> ModelCost:
    """Return the costs of all blocks under a layout."""
    recompute = layout.recompute
    kinds = (recompute,) * len(profile.blocks) if isinstance(recompute, str) else recompute
    blocks = profile.parts
    of_kind = {id(block): cost_of(block) for block in {id(block): block for block in blocks}.values()}
    costs = [of_kind[id(block)] for block in blocks]  # alike blocks are one object
    return ModelCost(costs, kinds, weights=not layout.adapters_only)


def _before(values: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _total(costs: Sequence[BlockCost], again: Sequence[PassCost], *, weights: bool) -> tuple[PassCost, PassCost]:
    passes = [part for cost in costs for part in (cost.forward, cost.input, *([cost.weight] if weights else []))]
    return _add(passes), _add(again)


def _add(passes: Sequence[PassCost]) -> PassCost:
    return PassCost(*(sum(column) for column in zip(*passes, strict=True)))
