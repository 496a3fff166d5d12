"""How to split: a `Plan` never changes the mathematics beyond what the recipe permits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from weft.cluster import Collective
from weft.collective import parse_choices, stand_in
from weft.document import HIDDEN, Rules, dump, spell
from weft.errors import CollectiveError, PlanError, did_you_mean
from weft.plan._compression import RUNNABLE_COMPRESSIONS, compression_conflicts
from weft.plan._local import OUTER_LEARNING_RATE, OUTER_MOMENTUM, local_conflicts
from weft.recipe import COMPRESSIONS, Precision

Axis = Literal["pipeline", "replicate", "shard", "expert", "context", "tensor"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
Recompute = Literal["none", "selective", "full"]

AXES: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
EXPERT_LENDERS: tuple[Axis, ...] = ("shard", "context")
"""Axes whose ranks share out experts: the one place that says so."""
COLLECTIVE_TIMEOUT_SECONDS = 600.0
"""How long ranks wait for one another where nothing else is said."""
_LONGEST_SECONDS = 2_592_000.0
"""30 days: clocks of backends count in nanoseconds, and overflow some time after."""
_RULES = Rules(PlanError)
_SETTINGS_OF_CODECS = (
    ("powersgd", "powersgd_rank", 4),
    ("topk", "topk_share", 0.01),
    ("randomk", "randomk_share", 0.1),
    ("onebit", "onebit_warmup_steps", 100),
)
"""Codec, its setting, and the setting's default, which says that it was not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """Sizes of the axes; their product is the world (expert borrows from shard × context and is not multiplied)."""

    pipeline: int = 1
    """Ranks that hold consecutive stages of the model."""
    replicate: int = 1
    """Data ranks with copies of the weights."""
    shard: int = 1
    """Data ranks that share the weights out among them under ZeRO-3; under ZeRO-0 to 2 like replicate."""
    context: int = 1
    """Ranks that share one long sequence."""
    tensor: int = 1
    """Ranks that share each matrix."""
    expert: int = 1
    """Ranks that share out experts."""
    order: tuple[Axis, ...] = AXES
    """Outermost first: tensor on the fastest links."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, *AXES)
        missing = [axis for axis in AXES if axis not in self.order]
        twice = [axis for axis in AXES if self.order.count(axis) > 1]
        if missing or twice:
            reason = f"names {twice[0]} twice" if twice else f"leaves out {', '.join(missing)}"
            raise _RULES.refuse(self, "order", f"{reason}: it must name each of {', '.join(AXES)} once.")

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
class DataParallelPlan:
    """How data ranks keep and reduce gradients."""

    zero: Literal[0, 1, 2, 3] = 1
    """1 and 2 shard over replicate × shard; 3 shards the weights over shard only."""
    algorithm: str = "auto"
    """Of the reductions and gathers, by the bytes of a bucket: one name, or a list such as
    `tree:0-32K;direct:32K-8M;ring:8M-max`, in which an entry without sizes takes the rest.  Algorithms that know
    all-reduces only do a reduce-scatter as one, and leave gathers to direct messages.  Messages go over Gloo, and what
    no algorithm is named for over what `compute.backend` says.  `measured`: what `weft comm explain` found here; then
    runs are equal bit for bit only while that stays."""
    bucket_bytes: int = 26_214_400
    """Gradients that are reduced together."""
    first_bucket_bytes: int = 1_048_576
    """The same, for the bucket that is ready first."""
    compression: str = "none"
    """Of gradients on the wire, with the recipe's permission only."""
    powersgd_rank: int = 4
    """Columns of PowerSGD's factors: more are more exact, and more bytes."""
    topk_share: float = 0.01
    """Share of the gradients that top-k sends."""
    randomk_share: float = 0.1
    """Share of every parameter's gradients that random-k sends."""
    onebit_warmup_steps: int = 100
    """Steps of plain AdamW with exact gradients before 1-bit Adam freezes the variance."""
    reduce_precision: Literal["fp32", "compute"] = "fp32"
    """Precision in which gradients are kept and summed when compute is bf16 or fp16."""
    reduce_every: Literal["auto", "step", "microbatch"] = "auto"
    """How often ZeRO-2 and 3 reduce-scatter gradients.  `microbatch`: each rank keeps its share only, and every
    microbatch sends all gradients.  `step`: they travel once, and stay whole from the first backward to the last.
    `auto`: `microbatch` with ZeRO-2 and 3 without a pipeline, `step` otherwise; a search names what is faster and fits.
    Copies of hybrid sharding are summed once per step in either case."""
    local_steps: int = 0
    """Steps that each replica takes by itself before replicas average what they learnt (local SGD, DiLoCo), with the
    recipe's permission only; 0: replicas sum their gradients in every step."""
    outer_learning_rate: float = OUTER_LEARNING_RATE
    """With local steps: how far the weights go towards the replicas' average; 1: all the way."""
    outer_momentum: float = OUTER_MOMENTUM
    """With local steps: Nesterov momentum of the averages; 0: none, which is local SGD."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        self._check_local_steps()
        _RULES.at_least(self, 1, "bucket_bytes", "first_bucket_bytes")
        if self.first_bucket_bytes > self.bucket_bytes and self.first_bucket_bytes != 1_048_576:
            raise _RULES.refuse(self, "first_bucket_bytes", f"is more than bucket_bytes = {self.bucket_bytes:_}.")
        if self.algorithm not in ("auto", "measured"):
            try:
                parse_choices(self.algorithm)
            except CollectiveError as error:
                raise _RULES.refuse(self, "algorithm", str(error)) from None
        if self.compression != "none" and self.compression not in COMPRESSIONS:
            hint = did_you_mean(self.compression, COMPRESSIONS) or f" Known are none, {', '.join(COMPRESSIONS)}."
            raise _RULES.refuse(self, "compression", f"is not a compression.{hint}")
        _RULES.at_least(self, 1, "powersgd_rank", "onebit_warmup_steps")
        _RULES.above_zero(self, "topk_share", "randomk_share")
        _RULES.between(self, 0, 1, "topk_share", "randomk_share", below=False)
        for codec, name, default in _SETTINGS_OF_CODECS:
            if self.compression != codec and getattr(self, name) != default:
                problem = f'has no effect with compression = "{self.compression}". Remove it, or use "{codec}".'
                raise _RULES.refuse(self, name, problem)

    def _check_local_steps(self) -> None:
        _RULES.at_least(self, 0, "local_steps")
        _RULES.above_zero(self, "outer_learning_rate")
        _RULES.between(self, 0, 1, "outer_momentum")
        for name, default in (("outer_learning_rate", OUTER_LEARNING_RATE), ("outer_momentum", OUTER_MOMENTUM)):
            if not self.local_steps and getattr(self, name) != default:
                raise _RULES.refuse(self, name, "has no effect with local_steps = 0. Remove it, or give local_steps.")

    def uncompressed(self) -> DataParallelPlan:
        """Return the same with gradients as they are."""
        return replace(self, compression="none", **{name: default for _, name, default in _SETTINGS_OF_CODECS})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelPlan:
    """How layers are split over the tensor axis."""

    scheme: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    """How many dimensions a matrix is cut in."""
    sequence: bool = False
    """Between the split layers, keep activations split along the sequence (Megatron's sequence parallelism)."""

    def __post_init__(self) -> None:
        _RULES.types(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelPlan:
    """How ranks that share a sequence see one another's keys and values."""

    scheme: Literal["ring", "all_gather", "ulysses"] = "ring"
    """`ring`: keys and values go round; `all_gather`: all are gathered at once; `ulysses`: heads are exchanged for
    positions."""

    def __post_init__(self) -> None:
        _RULES.types(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParallelPlan:
    """How blocks are cut into stages and in which order microbatches pass them."""

    schedule: Schedule = "1f1b"
    """The order of forwards and backwards."""
    chunks_per_rank: int = 1
    """Stages on each pipeline rank."""
    cuts: tuple[int, ...] | None = None
    """First block of each later stage (stages = pipeline × chunks_per_rank); None: cut by cost."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "chunks_per_rank")
        cuts = self.cuts or ()
        if any(later <= earlier for earlier, later in zip(cuts, cuts[1:], strict=False)) or min(cuts, default=1) < 1:
            raise _RULES.refuse(self, "cuts", "must rise, from 1 up: they are the first blocks of later stages.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchPlan:
    """How the global batch falls into microbatches."""

    size: int = 1
    """Samples per microbatch and data rank."""
    per_step: int | tuple[int, ...] = 1
    """Microbatches per step on each data rank; a list gives data ranks unequal shares."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "size")
        if isinstance(self.per_step, int):
            _RULES.at_least(self, 1, "per_step")
        elif not self.per_step or min(self.per_step) < 1:
            raise _RULES.refuse(self, "per_step", "must give each data rank at least 1 microbatch.")

    def shares(self, data_ranks: int) -> tuple[int, ...]:
        """Microbatches of each data rank."""
        return (self.per_step,) * data_ranks if isinstance(self.per_step, int) else self.per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What is kept, and what is computed again."""

    recompute: Recompute | tuple[Recompute, ...] = "none"
    """One word for all blocks, or one per block."""
    offload: Literal["none", "optimizer", "activations"] = "none"
    """What waits in host memory."""
    fused_loss: bool = True
    """Compute head and vocabulary loss together in token chunks, so that full logits never exist."""

    def __post_init__(self) -> None:
        _RULES.types(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlan:
    """In what precision and on what each rank computes."""

    precision: Precision = "fp32"
    """Of forward and backward; masters stay fp32 with bf16 and fp16."""
    compile: bool = False
    """Compile each block with torch.compile."""
    threads_per_rank: int = 1
    """Of CPU computation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: an accelerator where there is one."""
    backend: Literal["auto", "gloo", "weft"] = "auto"
    """What carries tensors of the CPU between ranks.  weft: memory that one host's ranks share, Gloo between hosts;
    auto: weft where ranks compute on the CPU.  Algorithms that data_parallel.algorithm names send messages over Gloo
    under each of them."""
    collective_timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS
    """How long a rank waits in a collective, or for a message, until those that have not come are given up: longer than
    ranks may be apart, as when one compiles or reads data, and at most 30 days."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "threads_per_rank")
        _RULES.above_zero(self, "collective_timeout_seconds")
        _RULES.between(self, 0.1, _LONGEST_SECONDS, "collective_timeout_seconds", below=False)
        if self.backend == "weft" and self.device == "cuda":
            raise _RULES.refuse(self, "backend", 'carries tensors of the CPU only, and device = "cuda". Use "auto".')


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run a recipe on a cluster.  `check_plan` says whether it fits a recipe."""

    mesh: MeshPlan = field(default_factory=MeshPlan)
    data_parallel: DataParallelPlan = field(default_factory=DataParallelPlan)
    tensor_parallel: TensorParallelPlan = field(default_factory=TensorParallelPlan)
    context_parallel: ContextParallelPlan = field(default_factory=ContextParallelPlan)
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
    def is_runnable(self) -> bool:
        """Whether the engine can run it today; `runnability` says why not."""
        return not runnability(self)

    @property
    def num_stages(self) -> int:
        return self.mesh.pipeline * self.pipeline_parallel.chunks_per_rank

    @property
    def global_batch_size(self) -> int:
        return self.microbatch.size * sum(self.microbatch.shares(self.mesh.data))


def runnability(plan: Plan) -> list[str]:
    """Return why a plan can only be predicted, one sentence per setting; an empty list when it can be run."""
    mesh, data = plan.mesh, plan.data_parallel
    is_missing = data.compression not in ("none", *RUNNABLE_COMPRESSIONS)
    wanted: tuple[tuple[bool, str, object, object, str], ...] = (
        (mesh.context > 1, "mesh.context", mesh.context, 1, "context parallelism"),
        (mesh.expert > 1, "mesh.expert", mesh.expert, 1, "expert parallelism"),
        (plan.tensor_parallel.scheme != "1d", "tensor_parallel.scheme", plan.tensor_parallel.scheme, "1d", "it"),
        (plan.memory.offload != "none", "memory.offload", plan.memory.offload, "none", "offloading"),
        (is_missing, "data_parallel.compression", data.compression, "none", "this compression"),
    )
    missing = [
        f"plan.{key} = {spell(value)} can be predicted but not run yet: the engine has not got {what}. "
        f"Use {spell(instead)}."
        for is_given, key, value, instead, what in wanted
        if is_given
    ]
    unfit = _unfit_algorithm(plan)
    missing += [unfit] if unfit is not None else []
    return missing if is_missing else [*missing, *compression_conflicts(plan), *local_conflicts(plan)]


def _unfit_algorithm(plan: Plan) -> str | None:
    """Why the engine cannot reduce as `data_parallel.algorithm` says."""
    data = plan.data_parallel
    if data.algorithm == "auto":
        return None
    start = f"plan.data_parallel.algorithm = {spell(data.algorithm)} cannot be run"
    if plan.compute.device == "cuda":
        return f'{start} with compute.device = "cuda": on CUDA NCCL chooses. Use "auto".'
    if data.compression != "none":
        return f'{start} with data_parallel.compression = "{data.compression}", which has its own. Use "auto".'
    if data.zero == 3 and plan.mesh.shard > 1:
        return f'{start} with zero = 3, where torch gathers and reduces the weights itself. Use "auto", or zero = 2.'
    if data.algorithm == "measured":
        return None
    used: tuple[Collective, ...] = ("all_reduce",) if data.zero == 0 else ("reduce_scatter", "all_gather")
    for name in parse_choices(data.algorithm).names:
        missing = next((collective for collective in used if stand_in(name, collective) is None), None)
        if missing is not None:
            return f"{start} with zero = {data.zero}: {name} does no {missing}. Use ring, direct or halving_doubling."
    return None


def axis_coordinates(mesh: MeshPlan, rank: int) -> dict[Axis, int]:
    """Where a rank stands on every axis; row-major in `mesh.order`, expert left out (it has no axis of its own)."""
    axes: list[Axis] = [axis for axis in mesh.order if axis != "expert"]
    sizes = [int(getattr(mesh, axis)) for axis in axes]
    coordinates: dict[Axis, int] = {}
    for position, axis in enumerate(axes):
        stride = math.prod(sizes[position + 1 :])
        coordinates[axis] = rank // stride % sizes[position]
    return coordinates
