"""One stage of a model on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from weft.comm import GroupView
from weft.parallel._context import StepContext
from weft.parallel._layout import ModelLayout


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
