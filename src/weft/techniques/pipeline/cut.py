"""Stages of a model: where to cut it, and the user's own class with everything foreign to a stage substituted."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.models import Blueprint, CutTable
from weft.parallel.autograd import no_view
from weft.plan import balanced_cuts


class Received(nn.Module):
    """Stands for the modules before this stage: returns the activation that came from the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Tensor | None = None
        """Set by the runner just before the stage's forward."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        del args, kwargs
        assert self.value is not None, "a later stage ran without an activation"
        return self.value


class Passed(nn.Module):
    """Stands for a module of another stage: returns its first argument."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return no_view(args[0] if args else next(iter(kwargs.values())))


class Absent(nn.Module):
    """Stands for a term that an earlier stage has added already: a zero that changes no dtype."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        found = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        return torch.zeros((), device=None if found is None else found.device)


def choose_cuts(
    block_costs: Sequence[float], num_blocks: int, num_stages: int, given: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the first block of each later stage, so that the slowest stage is as fast as can be.

    `block_costs` is [stem, block 0, …, tail] in any unit; empty: every block costs the same and stem and tail nothing.
    Stem and tail count with the first and last stage.  Every stage has at least one block.  Among equally fast
    slowest stages the most even cut wins (smallest sum of squares).  `given` cuts are only checked.

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
    if given is None:
        return best
    edges = [0, *given, num_blocks]
    if len(given) != num_stages - 1 or any(low >= high for low, high in zip(edges, edges[1:], strict=False)):
        raise PlanError(
            f"plan.pipeline_parallel.cuts = {list(given)} does not cut {num_blocks} blocks into {num_stages} stages: "
            f"it takes {num_stages - 1} rising numbers between 1 and {num_blocks - 1}. "
            f"By cost they would be {list(best)}; leave cuts out to take them."
        )
    return tuple(given)


def cut_table_of(blueprint: Blueprint) -> CutTable:
    """Return the blueprint's cut table.

    Raises:
        PlanError: the model has none.
    """
    if blueprint.cut is None:
        raise PlanError(
            f"plan.mesh.pipeline > 1 cuts the model into stages, but {type(blueprint.module).__name__} has no table of "
            f"where it may be cut. Set plan.mesh.pipeline = 1, or let the model's factory return a "
            f"weft.models.Blueprint with cut = CutTable(entry=…, blocks=…, tail=…)."
        )
    return blueprint.cut


def stage_of(name: str, table: CutTable, cuts: Sequence[int]) -> int | None:
    """Stage that owns the module, parameter or buffer `name`; None: it stands in no table and is on every stage."""
    owned = [(prefix, 0) for prefix in table.stem]
    owned += [(prefix, sum(index >= cut for cut in cuts)) for index, prefix in enumerate(table.blocks)]
    owned += [(prefix, len(cuts)) for prefix in table.tail]
    return next((stage for prefix, stage in owned if name == prefix or name.startswith(f"{prefix}.")), None)


def cut_stage(blueprint: Blueprint, stage: int, cuts: Sequence[int]) -> nn.Module:
    """Return a copy of the model that computes one stage only; names, and ties within the stage, are kept.

    Foreign modules are not copied at all, so that nobody holds the whole model.  `blueprint.module` stays whole.
    """
    table, module = cut_table_of(blueprint), blueprint.module
    substitutes: dict[str, nn.Module] = {}
    if stage > 0:
        substitutes[table.entry] = Received()
        substitutes |= {name: Absent() for name in table.stem_zero} | {name: Passed() for name in table.stem_skip}
    if stage < len(cuts):
        substitutes |= {name: Passed() for name in table.tail}
    substitutes |= {name: Passed() for name in table.blocks if stage_of(name, table, cuts) != stage}
    memo = {id(module.get_submodule(name)): substitute for name, substitute in substitutes.items()}
    return copy.deepcopy(module, memo)
