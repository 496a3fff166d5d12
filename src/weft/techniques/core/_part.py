"""One stage of a model on this rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from weft.comm.mesh import GroupView
from weft.model.blueprint import Blueprint
from weft.techniques.core._context import StepContext
from weft.techniques.core._layout import GridSplit, ModelLayout, ParameterLayout, Split
from weft.techniques.core.grid import PartGrid


@dataclass(slots=True, kw_only=True)
class ModelPart:
    """One pipeline stage: the user's model class with foreign modules substituted (without a pipeline: the model)."""

    module: nn.Module
    stage: int = 0
    """Index of the stage among all stages of the model, 0 being the one that sees the inputs."""
    is_first: bool = True
    is_last: bool = True
    layout: ModelLayout = field(default_factory=ModelLayout)
    context: StepContext = field(default_factory=StepContext)
    ties: dict[str, GroupView] = field(default_factory=dict[str, GroupView])
    """Local names of parameters that other stages hold too → pipeline ranks that hold them (only this one: `group` is
    None, and the parts of this rank share one Parameter).  Their gradients are sums over these ranks."""
    shares_sequence: bool = False
    """Whether the tensor ranks share the sequence between the blocks' matrices, each with its own positions."""
    grid: PartGrid | None = None
    """The 2-D mesh of the part's tensor ranks; None: they are in one dimension."""


def whole_part(blueprint: Blueprint, context: StepContext) -> ModelPart:
    """Return the model as one part: a copy, unless it was really constructed, where it is the module itself."""
    module = blueprint.module if blueprint.initialise is None else copy.deepcopy(blueprint.module)
    entries = {name: ParameterLayout(name=name, shape=tensor.shape) for name, tensor in module.named_parameters()}
    for name, buffer in module.named_buffers():
        entries[name] = ParameterLayout(name=name, shape=buffer.shape, is_buffer=True)
    return ModelPart(module=module, layout=ModelLayout(entries), context=context)


def is_own(part: nn.Module, blueprint: Blueprint, name: str) -> bool:
    """Whether `name` is the model's own module in this part and not what a stage put in its place."""
    return type(part.get_submodule(name)) is type(blueprint.module.get_submodule(name))


def first_names(module: nn.Module) -> dict[str, str]:
    """Return, for every name of a parameter or buffer, the first name under which the same tensor is found."""
    seen, names = dict[int, str](), dict[str, str]()
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        names[name] = seen.setdefault(id(tensor), name)
    return names


def fill_layout(
    layout: ModelLayout, part: nn.Module, names: Mapping[str, str], splits: Mapping[str, Split | GridSplit]
) -> None:
    """Enter every parameter and floating buffer of the part, before it is cut; keep what others said of ties."""
    for name, parameter in part.named_parameters(remove_duplicate=False):
        layout.entries[name] = _entry(layout, name, names, parameter.shape, splits.get(name), is_buffer=False)
    for name, buffer in part.named_buffers(remove_duplicate=False):
        if buffer.is_floating_point():
            layout.entries[name] = _entry(layout, name, names, buffer.shape, splits.get(name), is_buffer=True)


def _entry(
    layout: ModelLayout,
    name: str,
    names: Mapping[str, str],
    shape: torch.Size,
    split: Split | GridSplit | None,
    *,
    is_buffer: bool,
) -> ParameterLayout:
    known = layout.entries.get(name)
    if known is None:
        known = ParameterLayout(name=names.get(name, name), shape=shape, is_buffer=is_buffer)
    return known if split is None else replace(known, placements={**known.placements, "tensor": split})
