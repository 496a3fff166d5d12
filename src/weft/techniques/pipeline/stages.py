"""Which stage holds what: where blocks are cut, whose a name is, and what several stages hold.  No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.config.plan import balanced_cuts
from weft.errors import PlanError


class BlockTable(Protocol):
    """Names of modules in forward order: what comes before the blocks, the blocks, what comes after; and between."""

    @property
    def stem(self) -> tuple[str, ...]: ...

    @property
    def blocks(self) -> tuple[str, ...]: ...

    @property
    def between(self) -> Mapping[str, int]: ...

    @property
    def tail(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter of the uncut model that several stages hold."""

    name: str
    """Its first name in the uncut model."""
    names: tuple[str, ...]
    stages: tuple[int, ...]
    """Ascending."""
    owner: int
    """The stage that owns `name`."""


def choose_cuts(
    block_costs: Sequence[float], num_blocks: int, num_stages: int, cuts: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the first block of each later stage, so that the slowest stage is as fast as can be.

    `block_costs` is [stem, block 0, …, tail] in any unit; empty: every block costs the same and stem and tail nothing.
    Stem and tail count with the first and last stage.  Every stage has at least one block.  Among equally fast
    slowest stages the most even cut wins (smallest sum of squares).  `cuts` cuts are only checked.

    Raises:
        PlanError: more stages than blocks, or given cuts that do not fit.
    """
    if num_stages > num_blocks:
        raise PlanError(
            f"plan.mesh.pipeline × plan.pipeline_parallel.chunks_per_rank = {num_stages} stages, but the model has "
            f"{num_blocks} blocks and every stage needs one. Use at most {num_blocks} stages."
        )
    costs = list(block_costs) or [0.0, *[1.0] * num_blocks, 0.0]
    assert len(costs) == num_blocks + 2, f"{len(costs)} block costs for {num_blocks} blocks, a stem and a tail"
    best = balanced_cuts(costs, num_stages)
    if cuts is None:
        return best
    edges = [0, *cuts, num_blocks]
    if len(cuts) != num_stages - 1 or any(low >= high for low, high in zip(edges, edges[1:], strict=False)):
        raise PlanError(
            f"plan.pipeline_parallel.cuts = {list(cuts)} does not cut {num_blocks} blocks into {num_stages} stages: "
            f"it takes {num_stages - 1} rising numbers between 1 and {num_blocks - 1}. "
            f"By cost they would be {list(best)}; leave cuts out to take them."
        )
    return tuple(cuts)


def stage_of(name: str, table: BlockTable, cuts: Sequence[int]) -> int | None:
    """Stage that owns the module, parameter or buffer `name`; None: it stands in no table and is on every stage."""
    owned = [(prefix, 0) for prefix in table.stem]
    blocks = [(prefix, index) for index, prefix in enumerate(table.blocks)]
    owned += [(prefix, sum(index >= cut for cut in cuts)) for prefix, index in (*blocks, *table.between.items())]
    owned += [(prefix, len(cuts)) for prefix in table.tail]
    return next((stage for prefix, stage in owned if name == prefix or name.startswith(f"{prefix}.")), None)


def ties_of(names: Mapping[str, Sequence[str]], table: BlockTable, cuts: Sequence[int]) -> list[Tie]:
    """Return the parameters that more than one stage holds, in the order of `names`: first name → all names."""
    ties: list[Tie] = []
    for name, aliases in names.items():
        holders: set[int] = set()
        for alias in aliases:
            stage = stage_of(alias, table, cuts)
            holders |= set(range(len(cuts) + 1)) if stage is None else {stage}
        if len(holders) > 1:
            stages = tuple(sorted(holders))
            ties.append(Tie(name, tuple(aliases), stages, stage_of(name, table, cuts) or stages[0]))
    return ties
