"""The prediction for one layout: time by cause, memory by kind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from weft.vectorized import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerms:
    """Seconds of a step of the slowest rank, by cause; they add up to the step.  Overlapped time is not in them."""

    ideal: float = 0.0
    """The model's FLOPs at the device's peak."""
    matrix_shapes: float = 0.0
    """Matrix products and attention above their ideal: tiles, waves, alignment, launches."""
    memory_bound: float = 0.0
    """Element-wise operators, norms, lookups."""
    recompute: float = 0.0
    tensor: float = 0.0
    """Exposed collectives of the tensor axis."""
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    """Exposed sends and receives."""
    bubble: float = 0.0
    """Waiting for other stages: warm-up, drain, unequal stages."""
    data: float = 0.0
    """Exposed reductions of gradients and gathers of parameters; exchange of batch norms' statistics."""
    optimizer: float = 0.0
    offload: float = 0.0
    other: float = 0.0
    """Stragglers, data loading, host overhead: the framework's scalar."""

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


class MemoryKinds(NamedTuple):
    """Bytes of one rank at its peak, by kind; columns of as many candidates where bounds are computed."""

    weights: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    buckets: Column
    """Communication buffers: gradient buckets, gathered layers."""
    workspace: Column
    """Memory of kernels, and of the framework's allocator for small things."""

    @property
    def allocated(self) -> Column:
        return sum(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """One pipeline rank."""

    rank: int
    """Rank on the pipeline axis."""
    kinds: MemoryKinds
    reserved: float
    """Allocated and what the allocator holds besides: fragmentation."""
    device: float
    """Reserved and what lies outside the allocator: the device's context, communicators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpan:
    """One action of one stage in the simulated schedule, for pictures."""

    rank: int
    kind: str
    """`forward`, `backward`, `input_backward`, `weight_backward`, `send`, `reduce`, `optimizer`."""
    chunk: int
    microbatch: int
    start: float
    """Seconds from the step's start."""
    stop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Time and memory of one step."""

    time: TimeTerms
    spread: float
    """Standard deviation of the logarithm of the step time: 0.06 is about ±6 %."""
    stages: tuple[StageMemory, ...]
    """One per pipeline rank."""
    usable_bytes: float
    """Memory of one device for everything but the margin."""
    margin_bytes: float = 0.0
    """Memory of one device which plans leave free because predictions of memory err (`Cluster.memory_margin`)."""
    model_flops: float
    """FLOPs of one step, all ranks: forward and backward, recomputation not counted, causal attention counted half."""
    spans: tuple[ScheduleSpan, ...] = ()
    """Only when asked for."""

    @property
    def step_seconds(self) -> float:
        return self.time.total

    @property
    def device_bytes(self) -> float:
        """Memory of one device: what may be filled and the margin."""
        return self.usable_bytes + self.margin_bytes

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.device)

    @property
    def fits(self) -> bool:
        return self.fullest.device <= self.usable_bytes
