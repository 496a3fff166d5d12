"""The model parts of this rank, freshly cut."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.model.blueprint import Blueprint
from weft.model.families import CutTable
from weft.techniques.core import ModelPart, StepContext
from weft.techniques.pipeline.cut import cut_stage, cut_table_of
from weft.techniques.pipeline.schedules import check_schedule, stage_ranks
from weft.techniques.pipeline.stages import choose_cuts
from weft.techniques.pipeline.ties import create_tie_groups, find_ties, stage_layout
from weft.techniques.pipeline.verify import verify_cut_table


def cut_parts(
    blueprint: Blueprint, plan: Plan, mesh: Mesh, context: StepContext, dtype: torch.dtype = torch.float32
) -> list[ModelPart]:
    """Return this rank's parts in rising order of stage, on the device of `blueprint.module` (meta, as a rule).

    `dtype` is what the model computes in.  Call on every rank alike (tied weights get process groups).  Parts of one
    rank do not share parameters yet: see `share_parameters`.  `blueprint.module` stays whole.

    Raises:
        PlanError: the model cannot be cut like this.
    """
    size, settings = mesh.size("pipeline"), plan.pipeline_parallel
    check_schedule(*settings.shape(size))
    table = cut_table_of(blueprint)
    if isinstance(table, CutTable):
        verify_cut_table(blueprint, table)
    num_stages = settings.num_stages(size)
    cuts = choose_cuts(blueprint.block_costs, len(table.blocks), num_stages, settings.cuts)
    ranks = stage_ranks(*settings.shape(size))
    ties = find_ties(blueprint.module, table, cuts)
    groups = create_tie_groups(ties, ranks, mesh)
    parts: list[ModelPart] = []
    for stage in (stage for stage, rank in enumerate(ranks) if rank == mesh.index("pipeline")):
        module = cut_stage(blueprint, stage, cuts, dtype)
        layout = stage_layout(blueprint.module, module, stage, table, cuts, ties)
        tied = {local: groups[entry.name] for local, entry in layout.entries.items() if entry.tied}
        parts.append(
            ModelPart(
                module=module,
                stage=stage,
                is_first=stage == 0,
                is_last=stage == num_stages - 1,
                layout=layout,
                context=context,
                ties=tied,
            )
        )
    _count_once(parts, {tie.name: ranks[tie.owner] == mesh.index("pipeline") for tie in ties})
    return parts


def _count_once(parts: list[ModelPart], owned: dict[str, bool]) -> None:
    """Of a parameter that several parts of this rank share, the lowest part's entry speaks for all."""
    seen: set[str] = set()
    for part in parts:
        for local in part.ties:
            entry = part.layout[local]
            part.layout.entries[local] = replace(entry, counts=owned[entry.name] and entry.name not in seen)
            seen.add(entry.name)
