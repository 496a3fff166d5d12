"""How a model is split, in numbers: what a `Plan` says, and what plans of other systems say that Weft cannot run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from weft.plan import (
    AXES,
    EXPERT_LENDERS,
    OUTER_LEARNING_RATE,
    OUTER_MOMENTUM,
    Axis,
    DataParallelPlan,
    Plan,
    PricedSchedule,
    Recompute,
    ReduceEvery,
)

FIRST_BUCKET_BYTES = DataParallelPlan().first_bucket_bytes
PricedPrecision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "fp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A point of the search space.  Everything is explicit; nothing is looked up elsewhere."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Borrows its ranks from `EXPERT_LENDERS`, as in a plan; beyond these from tensor, as other systems allow."""
    order: tuple[Axis, ...] = AXES
    """Outermost first."""
    zero: int = 0
    sequence_parallel: bool = False
    tensor_scheme: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    context_scheme: Literal["ring", "all_gather", "ulysses"] = "ring"
    schedule: PricedSchedule = "1f1b"
    chunks: int = 1
    """Stages on each pipeline rank."""
    cuts: tuple[int, ...] | None = None
    """First block of each later stage; None: by cost (`balanced_cuts`)."""
    microbatch_size: int = 1
    """Samples per microbatch and data rank."""
    microbatches: int = 1
    """Per step, of the data rank that has most."""
    recompute: Recompute | tuple[Recompute, ...] = "none"
    offload: Literal["none", "optimizer", "activations"] = "none"
    fused_loss: bool = False
    adapters_only: bool = False
    """Whether the weights are frozen and small adapters train (LoRA): no gradients of weights, no optimizer state."""
    precision: PricedPrecision = "bf16"
    gradient_bytes: int = 4
    """Of one element of the gradients that are kept and reduced."""
    reduce_every: ReduceEvery = "auto"
    """How often ZeRO-2 and 3 reduce gradients (`DataParallelPlan.reduce_every`); `auto`: as the stack does."""
    uneven: bool = field(default=False, compare=False)
    """Whether data ranks have unequal numbers of microbatches: then not every one can end with a reduction, and ZeRO-3
    holds weights from the first forward to the last backward.  Not compared: batch and data ranks say it."""
    master_bytes: int = 12
    """Of optimizer state per parameter, masters included."""
    bucket_bytes: int = 26_214_400
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    """Of the bucket that is ready first, where that is less."""
    compression: str = "none"
    algorithm: str = "auto"
    local_steps: int = 0
    """Steps between two averages of the replicas; 0: their gradients are summed in every step."""
    outer_learning_rate: float = OUTER_LEARNING_RATE
    outer_momentum: float = OUTER_MOMENTUM

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def data(self) -> int:
        return self.replicate * self.shard

    @property
    def expert_room(self) -> int:
        """As `MeshPlan.expert_room`."""
        return math.prod(getattr(self, axis) for axis in EXPERT_LENDERS)

    @property
    def summing(self) -> int:
        """Data ranks that sum their gradients in every step: all, or those of one replica under local steps."""
        return self.shard if self.local_steps else self.data

    @property
    def reduced_by(self) -> str:
        """`algorithm` where it is obeyed: compression, local steps and ZeRO-3's shards have ways of their own."""
        has_own = self.compression != "none" or self.local_steps or (self.zero == 3 and self.shard > 1)
        return "auto" if has_own else self.algorithm

    @property
    def outer_bytes(self) -> float:
        """Per parameter, of the anchor and the outer momentum that local steps need."""
        if not self.local_steps:
            return 0.0
        return (2.0 if self.outer_momentum else 1.0) * (8 if self.precision == "fp64" else 4)

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.chunks

    @classmethod
    def of(cls, plan: Plan, *, master_bytes: int | None = None) -> Layout:
        """The layout that a plan describes.  `master_bytes` comes from the recipe's optimizer (AdamW otherwise)."""
        mesh, data, compute = plan.mesh, plan.data_parallel, plan.compute
        mixed = compute.precision in ("bf16", "fp16")
        element = 8 if compute.precision == "fp64" else 4
        return cls(
            pipeline=mesh.pipeline,
            replicate=mesh.replicate,
            shard=mesh.shard,
            context=mesh.context,
            tensor=mesh.tensor,
            expert=mesh.expert,
            order=mesh.order,
            zero=data.zero,
            sequence_parallel=plan.tensor_parallel.sequence,
            tensor_scheme=plan.tensor_parallel.scheme,
            context_scheme=plan.context_parallel.scheme,
            schedule=plan.pipeline_parallel.schedule,
            chunks=plan.pipeline_parallel.chunks_per_rank,
            cuts=plan.pipeline_parallel.cuts,
            microbatch_size=plan.microbatch.size,
            microbatches=max(plan.microbatch.shares(mesh.data)),
            recompute=plan.memory.recompute,
            offload=plan.memory.offload,
            fused_loss=plan.memory.fused_loss,
            precision=compute.precision,
            gradient_bytes=2 if mixed and data.reduce_precision == "compute" else element,
            reduce_every=data.reduce_every,
            uneven=len(set(plan.microbatch.shares(mesh.data))) > 1,
            master_bytes=master_bytes if master_bytes is not None else (12 if mixed else 2 * element),
            bucket_bytes=data.bucket_bytes,
            first_bucket_bytes=_first_bucket(data),
            compression=data.compression,
            algorithm=data.algorithm,
            local_steps=data.local_steps,
            outer_learning_rate=data.outer_learning_rate,
            outer_momentum=data.outer_momentum,
        )


def _first_bucket(data: DataParallelPlan) -> int:
    """A first bucket like the others is no smaller one; the default says so of every size."""
    first = data.first_bucket_bytes
    return max(first, FIRST_BUCKET_BYTES) if first >= data.bucket_bytes else first
