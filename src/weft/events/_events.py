"""The events of a run: frozen dataclasses that hold values, not texts, with units in their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEvent:
    """The loop begins."""

    kind: ClassVar[str] = "start"
    step: int
    """Steps done before, where a run is resumed."""
    num_steps: int | None
    """Steps when it will be done; None where the loop is the user's."""
    world_size: int
    plan: str
    """Digest of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEvent:
    """The loop has ended well, or was stopped by a signal."""

    kind: ClassVar[str] = "end"
    step: int
    stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """A step has been done: what all ranks agreed on in it."""

    kind: ClassVar[str] = "step"
    step: int
    """Finished steps, this one included."""
    loss: float
    """Global loss sum over global count; nan when nothing counted."""
    count: float
    """Tokens with a label, or samples, of the global batch, on every rank: `loss * count` is its sum, for a mean over
    an epoch.  `len(batch)` is the rank's share alone."""
    gradient_norm: float
    """Norm of the whole gradient, before clipping; where replicas step by themselves, of the replica that has the
    largest."""
    learning_rate: float
    """Rate of the step; of the first parameter group of an optimizer of the user's own."""
    skipped: bool
    """Whether the update was left out, on all ranks, because a gradient was not finite."""
    num_skipped: int
    """Steps skipped since the start."""
    loss_scale: float
    memory_bytes: int
    """Peak of the rank that holds most."""
    auxiliary: Mapping[str, float] = field(default_factory=dict[str, float])
    """Values of the loss's auxiliary terms, unweighted and not in `loss`; of this rank's replica."""
    load: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """Share of the choices of the batch that each expert had, by router of a mixture; none where it was not asked."""
    router_entropy: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean over tokens of the entropy of a router's scores, in nats: at most log(experts)."""
    some_unused: bool = False
    """Whether some parameter took no part on some rank, so that ranks asked one another which."""
    stop: bool = False
    """Whether some rank was asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEvent:
    """Time of this rank's last steps, by phase."""

    kind: ClassVar[str] = "phase"
    step: int
    num_steps: int
    """Steps that the sums are over."""
    seconds: Mapping[str, float]
    """Seconds by `<phase>_seconds`; `step_seconds` is the whole, `other_seconds` the rest of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEvent:
    """Traffic of this rank along one axis of the mesh in its last steps."""

    kind: ClassVar[str] = "collective"
    step: int
    num_steps: int
    axis: str
    count: int
    num_bytes: int
    total_seconds: float
    """Time from launch to end."""
    exposed_seconds: float
    """Time inside waits and blocking calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent:
    """Memory of this rank."""

    kind: ClassVar[str] = "memory"
    step: int
    peak_bytes: int
    """Peak since the start of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateEvent:
    """Speed of the whole job in its last steps.  It is the last event of a report."""

    kind: ClassVar[str] = "rate"
    step: int
    num_steps: int
    samples_per_second: float
    tokens_per_second: float | None
    """None for samples that have no tokens."""
    flops_per_second: float | None
    peak_share: float | None
    """Share of the measured peak, 0 to 1."""
    remaining_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEvent:
    """A session's loop has taken the last batch of a pass through its data."""

    kind: ClassVar[str] = "epoch"
    step: int
    number: int
    """Number of the pass that is through, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEvent:
    """The validation set has been gone through."""

    kind: ClassVar[str] = "evaluation"
    step: int
    validation_loss: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further values by name, of a session's own metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent:
    """A save has ended."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    """Path of the checkpoint; that of the folder of all where it failed."""
    seconds: float
    """Time that training waited."""
    copy_seconds: float = 0.0
    """Time that the copy from memory to the disk took, beside training; 0 where training waited for the disk."""
    problem: str = ""
    """Why it failed; empty where it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEvent:
    """Something worth a line."""

    kind: ClassVar[str] = "message"
    text: str
    source: str = "weft"
    """Name of the logger or of the package that says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningEvent:
    """Something that the user should know."""

    kind: ClassVar[str] = "warning"
    text: str
    source: str = "weft"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEvent:
    """A rank ends with an error."""

    kind: ClassVar[str] = "failure"
    error: str
    """Name of the exception's class, or of the signal that killed the rank."""
    text: str
    rank: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEvent:
    """The ranks start again, after a failure or under another plan: another generation of the job begins."""

    kind: ClassVar[str] = "generation"
    number: int
    """Number of the generation that begins, counted from 1 for the run's first start."""
    world_size: int
    plan: str
    """Digest of the plan."""
    failure: str
    """Kind of the failure that ended the generation before, a policy of `[run.on_failure]`; `replan` where it handed
    over to another plan."""
    rank: int
    """Rank that failed first."""
    host: str
    """Host of that rank."""
    cause: str
    """One line: how the rank failed; for `replan`, from which plan to which."""
    failed_step: int
    """Step in which it failed, counted from 1; 0 where the loop had not begun."""
    restored_step: int
    """Finished steps of the saved state from which the ranks go on; 0: the run begins anew."""
    num_restarts: int
    """Restarts since a new step was last saved, this one included."""
    plan_change: str = ""
    """Both plans and why, where fewer ranks go on after a failure."""


Event = (
    StartEvent
    | EndEvent
    | StepEvent
    | PhaseEvent
    | CollectiveEvent
    | MemoryEvent
    | RateEvent
    | EpochEvent
    | EvaluationEvent
    | CheckpointEvent
    | MessageEvent
    | WarningEvent
    | FailureEvent
    | GenerationEvent
)
"""Everything that a run can say."""
OnEvent = Callable[[Event, int], object]
"""`on_event(event, model)`: what happened, and to which of a session's models, from 1."""


def fields_of_event(event: Event) -> dict[str, Any]:
    """Return an event's fields by name, as they are."""
    return {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
