"""Stages of a model: where to cut it, and the user's own class with everything foreign to a stage substituted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.families import Cut, CutTable, FoundCut
from weft.techniques.core.views import no_view
from weft.techniques.pipeline.border import cut_found
from weft.techniques.pipeline.copies import copied
from weft.techniques.pipeline.stages import stage_of


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
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        return torch.zeros((), device=None if first is None else first.device)


def cut_table_of(blueprint: Blueprint) -> Cut:
    """Return where the blueprint says that its model may be cut.

    Raises:
        PlanError: it may not be, or a table names modules that it has not.
    """
    if blueprint.cut is None:
        kind = type(blueprint.module).__name__
        raise PlanError(
            f"plan.mesh.pipeline > 1 cuts the model into stages, but {kind} has no table of where it may be"
            f" cut: {blueprint.why_not('blocks')}. Set plan.mesh.pipeline = 1, or let the model's factory return"
            " a weft.model.blueprint.Blueprint with cut = CutTable(entry=…, blocks=…, tail=…)."
        )
    if isinstance(blueprint.cut, CutTable):
        _check_names(blueprint.cut, blueprint.module)
    return blueprint.cut


def cut_stage(blueprint: Blueprint, stage: int, cuts: Sequence[int], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a copy of the model that computes one stage only; names, and ties within the stage, are kept.

    Foreign modules are not copied at all, so that nobody holds the whole model.  `blueprint.module` stays whole.
    `dtype` is what the model computes in.
    """
    table, module = cut_table_of(blueprint), blueprint.module
    if isinstance(table, FoundCut):
        return cut_found(module, table, stage, cuts, dtype)
    substitutes: dict[str, nn.Module] = {}
    if stage > 0:
        substitutes[table.entry] = Received()
        substitutes |= {name: Absent() for name in table.stem_zero} | {name: Passed() for name in table.stem_skip}
    if stage < len(cuts):
        substitutes |= {name: Passed() for name in table.tail}
    substitutes |= {name: Passed() for name in table.blocks if stage_of(name, table, cuts) != stage}
    memo = {id(module.get_submodule(name)): substitute for name, substitute in substitutes.items()}
    return copied(module, memo)


def _check_names(table: CutTable, module: nn.Module) -> None:
    names = {name for name, _ in module.named_modules()}
    missing = [name for name in (*table.stem, *table.blocks, *table.tail) if name not in names]
    if missing:
        raise PlanError(
            f"the table of where the {type(module).__name__} may be cut names modules that it has not:"
            f" {', '.join(missing)}. Name them as named_modules() does, or leave the table out: its forward is looked"
            " at then."
        )
