"""One stage of a model on this rank."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from torch import nn

from weft.comm import GroupView
from weft.models import Blueprint
from weft.parallel._context import StepContext
from weft.parallel._layout import ModelLayout, ParameterLayout


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


def whole_part(blueprint: Blueprint, context: StepContext) -> ModelPart:
    """Return the model as one part: a copy, unless it was really constructed, where it is the module itself."""
    module = blueprint.module if blueprint.initialise is None else copy.deepcopy(blueprint.module)
    entries = {name: ParameterLayout(name=name, shape=tensor.shape) for name, tensor in module.named_parameters()}
    for name, buffer in module.named_buffers():
        entries[name] = ParameterLayout(name=name, shape=buffer.shape, is_buffer=True)
    return ModelPart(module=module, layout=ModelLayout(entries), context=context)
