"""How a model is split, in numbers: what a `Plan` says, and what plans of other systems say that Weft cannot run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from weft.config.plan import LayoutSettings, Plan, plan_settings
from weft.config.settings import DeclaredSetting
from weft.techniques.buckets.settings import FIRST_BUCKET_BYTES as FIRST_BUCKET_BYTES
from weft.techniques.context.settings import ContextScheme
from weft.techniques.expert.settings import ExpertExchange
from weft.techniques.pipeline.schedules import SPLIT_BACKWARD, PricedSchedule
from weft.techniques.pipeline.settings import TORCH_SCHEDULES
from weft.techniques.tensor.settings import TensorScheme
from weft.techniques.zero.settings import Stage

PricedPrecision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "fp4"]
ELEMENT_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "tf32": 4}
"""Size of activations between operators; 2 for all other precisions: narrower ones are cast at the matrix products."""
_FEW = 0.5
"""Trained share of elements below which the frozen ones are the model, and the trained ones stand beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(LayoutSettings):
    """A point of the search space.  Everything is explicit; nothing is looked up elsewhere.

    `expert` may borrow more ranks than `EXPERT_LENDERS` have: those of tensor, as other systems allow.  Where bounds
    are computed, sizes are columns of as many candidates (`weft.vectorized`).
    """

    zero: Stage = 0
    sequence_parallel: bool = False
    tensor_scheme: TensorScheme = "1d"
    context_scheme: ContextScheme = "ring"
    context_ulysses: int = 0
    """Neighbours that exchange heads under `usp`; 0: as many as fit."""
    expert_exchange: ExpertExchange = "all_to_all"
    cuts_experts: bool = True
    """Whether each of the tensor ranks has a part of every expert and sees all tokens, as in Weft; otherwise they have
    whole experts and share out their tokens (Megatron-LM's `--expert-tensor-parallel-size 1`)."""
    schedule: PricedSchedule = "1f1b"
    chunks: int = 1
    """Stages on each pipeline rank."""
    cuts: tuple[int, ...] | None = None
    """First block of each later stage; None: by cost (`balanced_cuts`)."""
    microbatch_size: int = 1
    """Samples per microbatch and data rank."""
    microbatches: int = 1
    """Microbatches per step, of the data rank that has most."""
    fused_loss: bool = False
    trained_share: float = 1.0
    """Share of the model's elements that are trained: the others have neither gradients nor optimizer states."""
    coded_share: float = 0.0
    """Share of the elements that are held as codes, whatever the precision."""
    code_bytes: float = 0.0
    """Bytes of these per element of the whole model."""
    precision: PricedPrecision = "bf16"
    gradient_bytes: int = 4
    """Bytes of one element of the gradients that are kept and reduced."""
    uneven: bool = field(default=False, compare=False)
    """Whether data ranks have unequal numbers of microbatches: then not every one can end with a reduction, and ZeRO-3
    holds weights from the first forward to the last backward.  Not compared: batch and data ranks say it."""
    master_bytes: int = 12
    """Bytes of optimizer state per parameter, masters included."""

    @property
    def summing(self) -> int:
        """Data ranks that sum their gradients in every step: all, or those of one replica under local steps."""
        return self.shard if self.replicas_step_alone else self.data

    @property
    def reduced_by(self) -> str:
        """`algorithm` where it is obeyed: compression, local steps and ZeRO-3's shards have ways of their own."""
        has_own = self.compresses or self.replicas_step_alone or (self.shards_weights and self.shard > 1)
        return "auto" if has_own else self.algorithm

    @property
    def expert_tensor(self) -> int:
        """Parts of each expert, one on every tensor rank."""
        return self.tensor if self.cuts_experts else 1

    @property
    def element_bytes(self) -> int:
        """Size of one element of weights and activations, as they compute and travel; narrower ones are cast at the
        matrix products."""
        return ELEMENT_BYTES.get(self.precision, 2)

    @property
    def adapters_only(self) -> bool:
        """Whether frozen weights are beside small adapters (LoRA): no gradients of large matrices are computed."""
        return self.trained_share < _FEW

    @property
    def held_bytes(self) -> float:
        """Mean size of an element of the weights as they are held."""
        return self.element_bytes * (1.0 - self.coded_share) + self.code_bytes

    @property
    def wide_bytes(self) -> int:
        """Bytes of one element of a master, whatever is computed in."""
        return 8 if self.precision == "fp64" else 4

    @property
    def splits_backward(self) -> bool:
        """Whether a pipeline computes gradients of weights in a pass of their own."""
        return self.pipeline > 1 and self.schedule in SPLIT_BACKWARD

    @property
    def torch_schedule(self) -> str | None:
        """The same as `PipelineSettings.torch_schedule`."""
        return TORCH_SCHEDULES.get(self.schedule)

    @property
    def schedule_line(self) -> str:
        """`1f1b`, `interleaved_1f1b × 2` with two chunks on every rank."""
        return f"{self.schedule} × {self.chunks}" if self.chunks > 1 else self.schedule

    def unpipelined(self) -> Self:
        """Return the same on one pipeline rank."""
        return replace(self, pipeline=1, schedule="1f1b", chunks=1, cuts=None)

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.chunks

    @classmethod
    def of(cls, plan: Plan, *, master_bytes: int | None = None) -> Layout:
        """The layout that a plan describes.  `master_bytes` comes from the recipe's optimizer (AdamW otherwise)."""
        mesh, data, precision = plan.mesh, plan.data_parallel, plan.compute.precision
        mixed = precision in ("bf16", "fp16")
        element = 8 if precision == "fp64" else 4
        shares = plan.microbatch.shares(mesh.data)
        derived: dict[str, Any] = {
            "microbatches": max(shares),
            "uneven": len(set(shares)) > 1,
            "gradient_bytes": 2 if mixed and data.reduces_narrow else element,
            "master_bytes": master_bytes if master_bytes is not None else (12 if mixed else 2 * element),
            **data.priced_limits(),
        }
        return cls(**{setting.layout: setting.of(plan) for setting in layout_settings()} | derived)


@functools.cache
def layout_settings() -> tuple[DeclaredSetting, ...]:
    """Return the settings of a plan that a layout has as they are."""
    names = {field.name for field in fields(Layout)}
    return tuple(setting for setting in plan_settings() if setting.layout in names)
