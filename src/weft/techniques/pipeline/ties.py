"""Parameters that several stages hold: tied weights, and whatever stands in no stage of its own.

Every holder computes its own part of the gradient.  Holders on different ranks sum theirs over a group of their own;
parts on one rank simply share the Parameter, and autograd sums.  One holder, the owner, counts in norms and
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from weft.comm.mesh import GroupView, Mesh
from weft.model.families import Cut
from weft.techniques.core import ModelLayout, ModelPart, ParameterLayout
from weft.techniques.pipeline.stages import Tie, stage_of, ties_of
from weft.techniques.pipeline.transport import pipeline_partition


def find_ties(module: nn.Module, table: Cut, cuts: Sequence[int]) -> list[Tie]:
    """Return the parameters of the uncut `module` that more than one stage holds, in the order of its parameters."""
    return ties_of(_names(module), table, cuts)


def _names(module: nn.Module) -> dict[str, list[str]]:
    """First name of every parameter → all its names."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return names


def create_tie_groups(ties: Sequence[Tie], ranks: Sequence[int], mesh: Mesh) -> dict[str, GroupView]:
    """Return, per tie, the ranks of this pipeline that hold it.  Call on every rank, with the rank of each stage."""
    made: dict[tuple[int, ...], GroupView] = {}
    groups: dict[str, GroupView] = {}
    for tie in ties:
        members = tuple(sorted({ranks[stage] for stage in tie.stages}))
        if members not in made:
            everyone = len(members) == mesh.size("pipeline")
            made[members] = (
                mesh["pipeline"] if everyone else mesh.create_group(pipeline_partition(mesh, members), "tied")
            )
        groups[tie.name] = made[members]
    return groups


def stage_layout(
    whole: nn.Module, part: nn.Module, stage: int, table: Cut, cuts: Sequence[int], ties: Sequence[Tie]
) -> ModelLayout:
    """Layout of a freshly cut, not yet split stage: names and shapes of the uncut model.

    Every tensor is listed once, under the name that `named_parameters()` and `named_buffers()` of the part give it.
    """
    first_name = {alias: name for name, aliases in _names(whole).items() for alias in aliases}
    tied = {tie.name: tie for tie in ties}
    layout = ModelLayout()
    for local, parameter in part.named_parameters():
        name = first_name[local]
        tie = tied.get(name)
        layout.entries[local] = ParameterLayout(
            name=name, shape=parameter.shape, tied=tie is not None, counts=tie is None or tie.owner == stage
        )
    for local, buffer in part.named_buffers():
        counts = stage_of(local, table, cuts) is not None or stage == 0
        layout.entries[local] = ParameterLayout(name=local, shape=buffer.shape, is_buffer=True, counts=counts)
    return layout


def share_parameters(parts: Sequence[ModelPart]) -> None:
    """Make the parts of this rank hold one Parameter for what they share.  Call it once parameters have storage.

    The lowest part's Parameter stays.
    """
    kept: dict[str, nn.Parameter] = {}
    for part in parts:
        for local, parameter in list(part.module.named_parameters(remove_duplicate=False)):
            entry = part.layout.entries.get(local)
            name = entry.name if entry is not None and entry.tied else None
            if name is not None and kept.setdefault(name, parameter) is not parameter:
                _replace(part.module, parameter, kept[name])


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for inner in module.modules():
        for leaf, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(inner, leaf, new)
