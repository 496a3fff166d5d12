"""How to split: a `Plan` never changes the mathematics beyond what the recipe permits."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack, get_type_hints

from weft.config.document import HIDDEN, Rules, dump
from weft.config.recipe import Precision
from weft.config.settings import DeclaredSetting, check_parts, declared, setting
from weft.errors import PlanError, did_you_mean
from weft.techniques.buckets.settings import BucketSettings, ReducePrecisionSettings
from weft.techniques.compression.settings import CompressionSettings
from weft.techniques.compute.settings import ComputePlan
from weft.techniques.context.settings import ContextSettings
from weft.techniques.data.settings import MicrobatchPlan, ReplicaAveraging
from weft.techniques.expert.settings import EXPERT_LENDERS, ExpertSettings
from weft.techniques.fused_loss.settings import FusedLossSettings
from weft.techniques.local_steps.settings import LocalStepsSettings
from weft.techniques.offload.settings import OffloadSettings
from weft.techniques.pipeline.settings import PipelineSettings
from weft.techniques.recompute.settings import RecomputeSettings
from weft.techniques.tensor.settings import TensorSettings
from weft.techniques.zero.settings import Stage, ZeroSettings

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
# This is the registry of settings: a name here gives a technique its place in plan files and in the flat layouts of
# prices.


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings(LocalStepsSettings, CompressionSettings, BucketSettings, ZeroSettings, ReplicaAveraging):
    """Settings of how data ranks keep and reduce gradients, as a price knows them."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings(FusedLossSettings, OffloadSettings, RecomputeSettings):
    """Settings of what is kept and what is computed again."""


@dataclass(frozen=True, kw_only=True)
class LayoutSettings(DataParallelSettings, MemorySettings, MeshSettings):
    """All settings that a flat layout (`weft.techniques.cost_terms.Layout`) has as a plan has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelPlan(ReducePrecisionSettings, DataParallelSettings):
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
class MemoryPlan(MemorySettings):
    """The activations that are kept, those that are computed again, and the states that are offloaded."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        check_parts(self)


class PlanKeywords(TypedDict, total=False):
    """Settings that people name without their section: `weft.Plan.fsdp(tensor=2)`, `weft.session(zero=3)`."""

    zero: Stage
    replicate: int
    shard: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    microbatches: int
    precision: Precision


PLAN_KEYWORDS: Mapping[str, str] = {
    "zero": "data_parallel.zero",
    **{axis: f"mesh.{axis}" for axis in AXES},
    "microbatches": "microbatch.per_step",
    "precision": "compute.precision",
}
"""Keyword → the dotted setting that it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run a recipe on a cluster.  `check_plan` says whether it fits a recipe.

    The class methods make plans for the ranks at hand: the job's ranks that no other axis takes become data ranks, and
    microbatches follow from the global batch.  They combine by keywords: `weft.Plan.fsdp(tensor=2)`.

    Keywords of each:
        zero: ZeRO stage, 0 to 3.
        replicate, shard: data ranks that hold copies, and that share the weights out: hybrid sharding.
        tensor, pipeline, context, expert: ranks of the axis.
        microbatches: of each data rank in a step (gradient accumulation; what a pipeline is filled with).
        precision: "fp32", "bf16" or "fp16", which the recipe or the session must permit.
    """

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

    @classmethod
    def ddp(cls, **more: Unpack[PlanKeywords]) -> Plan:
        """Every data rank holds the whole model, and gradients are averaged (PyTorch's DDP): ZeRO-0."""
        return plan_by_keywords("weft.Plan.ddp()", more, {"zero": 0})

    @classmethod
    def fsdp(cls, **more: Unpack[PlanKeywords]) -> Plan:
        """Data ranks share weights, gradients and optimizer states out (FSDP's full sharding): ZeRO-3.

        `shard=8` shards over groups of 8 ranks that hold copies of one another (hybrid sharding).
        """
        return plan_by_keywords("weft.Plan.fsdp()", more, {"zero": 3})

    @classmethod
    def zero(cls, stage: Stage, /, **more: Unpack[PlanKeywords]) -> Plan:
        """Data ranks share out optimizer states (1), gradients too (2), weights too (3), or nothing (0)."""
        return plan_by_keywords(f"weft.Plan.zero({stage!r})", more, {"zero": stage})

    @classmethod
    def tensor(cls, ranks: int, /, **more: Unpack[PlanKeywords]) -> Plan:
        """So many ranks share each matrix (Megatron's tensor parallelism)."""
        return plan_by_keywords(f"weft.Plan.tensor({ranks!r})", more, {"tensor": ranks})

    @classmethod
    def pipeline(cls, ranks: int, /, **more: Unpack[PlanKeywords]) -> Plan:
        """So many ranks hold consecutive stages of the model, and play 1F1B.

        Without `microbatches=` a step has at least as many of them as ranks; more make the bubble smaller.
        """
        return plan_by_keywords(f"weft.Plan.pipeline({ranks!r})", more, {"pipeline": ranks})

    @classmethod
    def context(cls, ranks: int, /, **more: Unpack[PlanKeywords]) -> Plan:
        """So many ranks share each sequence, and pass keys and values round a ring."""
        return plan_by_keywords(f"weft.Plan.context({ranks!r})", more, {"context": ranks})

    @classmethod
    def expert(cls, ranks: int, /, **more: Unpack[PlanKeywords]) -> Plan:
        """So many of the data ranks share the experts of a mixture out."""
        return plan_by_keywords(f"weft.Plan.expert({ranks!r})", more, {"expert": ranks})

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


def plan_by_keywords(call: str, keywords: PlanKeywords, said: PlanKeywords | None = None) -> Plan:
    """Return a plan that says what keywords say, and leaves the rest open.

    Args:
        call: as messages name it: `weft.Plan.fsdp()`.
        said: what the call says by its own name.

    Raises:
        PlanError: a keyword is unknown, impossible, or says something else than the call's name.
    """
    given: dict[str, Any] = {**keywords}
    refuse_unknown_keyword(call, given)
    for word, value in (said or {}).items():
        if given.setdefault(word, value) != value:
            raise PlanError(f"{call} says {word} = {value!r}, and {word} = {given[word]!r} beside it. Leave one out.")
    sections: dict[str, dict[str, Any]] = {}
    for word, value in given.items():
        section, name = PLAN_KEYWORDS[word].split(".")
        sections.setdefault(section, {})[name] = value
    kinds = get_type_hints(Plan)
    try:
        parts = {name: kinds[name](**values) for name, values in sections.items()}
    except PlanError as error:
        bad = error.setting
        if bad is None:
            raise
        words = {key.partition(".")[2]: word for word, key in PLAN_KEYWORDS.items()}
        raise PlanError(f"{call}: {words[str(bad.path[0])]} = {bad.value} {bad.problem}") from None
    return Plan(**parts, origins={PLAN_KEYWORDS[word]: call for word in given})


def refuse_unknown_keyword(call: str, keywords: Iterable[str], known: Iterable[str] = ()) -> None:
    """Raise `PlanError` for a keyword that is none of a plan's.  `known`: further ones of the call, for a hint."""
    for word in keywords:
        if word not in PLAN_KEYWORDS:
            meant = did_you_mean(word, [*PLAN_KEYWORDS, *known])
            others = f" Of a plan it takes {', '.join(PLAN_KEYWORDS)}."
            raise PlanError(f"{call} knows no {word}=.{meant or others}")


@functools.cache
def plan_settings() -> tuple[DeclaredSetting, ...]:
    """Return every setting of a plan where it stands, in the order of a plan file."""
    return tuple(declared(Plan, get_type_hints(Plan)))


def axis_coordinates(mesh: MeshPlan, rank: int) -> dict[Axis, int]:
    """Return a rank's coordinate on every axis; row-major in `mesh.order`. The expert axis is left out: it borrows its
    ranks from others."""
    axes: list[Axis] = [axis for axis in mesh.order if axis != "expert"]
    sizes = [int(getattr(mesh, axis)) for axis in axes]
    coordinates: dict[Axis, int] = {}
    for position, axis in enumerate(axes):
        stride = math.prod(sizes[position + 1 :])
        coordinates[axis] = rank // stride % sizes[position]
    return coordinates
