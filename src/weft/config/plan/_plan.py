"""How to split: a `Plan` never changes the mathematics beyond what the recipe permits."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_type_hints

from weft.config.document import HIDDEN, Rules, dump
from weft.config.settings import Declared, check_parts, declared, setting
from weft.errors import PlanError
from weft.techniques.buckets.settings import BucketSettings, ReducePrecisionSettings
from weft.techniques.compression.settings import CompressionSettings
from weft.techniques.compute.settings import ComputePlan
from weft.techniques.context.settings import ContextSettings
from weft.techniques.data.settings import MicrobatchPlan
from weft.techniques.expert.settings import EXPERT_LENDERS, ExpertSettings
from weft.techniques.fused_loss.settings import FusedLossSettings
from weft.techniques.local_steps.settings import LocalStepsSettings
from weft.techniques.offload.settings import OffloadSettings
from weft.techniques.pipeline.settings import PipelineSettings
from weft.techniques.recompute.settings import RecomputeSettings
from weft.techniques.tensor.settings import TensorSettings
from weft.techniques.zero.settings import ZeroSettings

Axis = Literal["pipeline", "replicate", "shard", "expert", "context", "tensor"]

AXES: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
BATCH_AXES: tuple[Axis, ...] = ("replicate", "shard", "context")
"""Axes whose ranks hold the same weights and see other samples, or other tokens of the same samples."""
_RULES = Rules(PlanError)


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """How many ranks each axis has, and how the axes lie on the hardware."""

    pipeline: int = setting(1, space="pipelines", asked=("pipeline", "pp"), explained=True)
    """Ranks that hold consecutive stages of the model."""
    replicate: int = setting(1, explained=True)
    """Data ranks with copies of the weights."""
    shard: int = setting(1, space="shards", asked=("shard",), explained=True)
    """Data ranks that share the weights out among them under ZeRO-3; under ZeRO-0 to 2 like replicate."""
    context: int = setting(1, space="contexts", asked=("context", "cp"), explained=True)
    """Ranks that share one long sequence."""
    tensor: int = setting(1, space="tensors", asked=("tensor", "tp"), explained=True)
    """Ranks that share each matrix."""
    expert: int = setting(1, space="experts", asked=("expert", "ep"), explained=True)
    """Ranks that share out experts."""
    order: tuple[Axis, ...] = setting(AXES, space="orders")
    """Outermost first: tensor on the fastest links."""

    @property
    def world_size(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Data ranks: those that see different samples."""
        return self.replicate * self.shard

    @property
    def expert_room(self) -> int:
        """Ranks that experts may be shared out over; replicas have all experts."""
        return math.prod(getattr(self, axis) for axis in EXPERT_LENDERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan(MeshSettings):
    """Sizes of the axes; their product is the world (expert borrows from shard × context and is not multiplied)."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, *AXES)
        missing = [axis for axis in AXES if axis not in self.order]
        twice = [axis for axis in AXES if self.order.count(axis) > 1]
        if missing or twice:
            reason = f"names {twice[0]} twice" if twice else f"leaves out {', '.join(missing)}"
            raise _RULES.refuse(self, "order", f"{reason}: it must name each of {', '.join(AXES)} once.")


# A section inherits its settings from the techniques that have a part in it; the last one named comes first in a file.


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelPlan(LocalStepsSettings, ReducePrecisionSettings, CompressionSettings, BucketSettings, ZeroSettings):
    """How data ranks keep and reduce gradients."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        check_parts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelPlan(TensorSettings):
    """How layers are split over the tensor axis."""

    def __post_init__(self) -> None:
        _RULES.types(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelPlan(ContextSettings):
    """How ranks that share a sequence see one another's keys and values."""

    def __post_init__(self) -> None:
        _RULES.types(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallelPlan(ExpertSettings):
    """How tokens meet experts that other ranks have."""

    def __post_init__(self) -> None:
        _RULES.types(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParallelPlan(PipelineSettings):
    """How blocks are cut into stages and in which order microbatches pass them."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        check_parts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(FusedLossSettings, OffloadSettings, RecomputeSettings):
    """What is kept, and what is computed again."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        check_parts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run a recipe on a cluster.  `check_plan` says whether it fits a recipe."""

    mesh: MeshPlan = field(default_factory=MeshPlan)
    data_parallel: DataParallelPlan = field(default_factory=DataParallelPlan)
    tensor_parallel: TensorParallelPlan = field(default_factory=TensorParallelPlan)
    context_parallel: ContextParallelPlan = field(default_factory=ContextParallelPlan)
    expert_parallel: ExpertParallelPlan = field(default_factory=ExpertParallelPlan)
    pipeline_parallel: PipelineParallelPlan = field(default_factory=PipelineParallelPlan)
    microbatch: MicrobatchPlan = field(default_factory=MicrobatchPlan)
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    compute: ComputePlan = field(default_factory=ComputePlan)
    origins: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False, metadata=HIDDEN)
    """Dotted key → where it was given: `plan.toml, line 3`, or `--set`.  No setting: not compared, not written."""

    def __post_init__(self) -> None:
        _RULES.types(self)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name this plan: the same for equal plans, on every machine."""
        return hashlib.sha256(dump(self, everything=True, descriptions=False).encode()).hexdigest()[:12]

    @property
    def is_predictable(self) -> bool:
        """Whether the planner can price it: every plan that can be written."""
        return True

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel.num_stages(self.mesh.pipeline)

    @property
    def global_batch_size(self) -> int:
        return self.microbatch.size * sum(self.microbatch.shares(self.mesh.data))


@functools.cache
def plan_settings() -> tuple[Declared, ...]:
    """Return every setting of a plan where it stands, in the order of a plan file."""
    return tuple(declared(Plan, get_type_hints(Plan)))


def axis_coordinates(mesh: MeshPlan, rank: int) -> dict[Axis, int]:
    """Where a rank stands on every axis; row-major in `mesh.order`, expert left out (it has no axis of its own)."""
    axes: list[Axis] = [axis for axis in mesh.order if axis != "expert"]
    sizes = [int(getattr(mesh, axis)) for axis in axes]
    coordinates: dict[Axis, int] = {}
    for position, axis in enumerate(axes):
        stride = math.prod(sizes[position + 1 :])
        coordinates[axis] = rank // stride % sizes[position]
    return coordinates
