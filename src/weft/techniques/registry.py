"""All techniques, and what is asked of them together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.config.plan import Plan
from weft.errors import PlanError
from weft.techniques.buckets.contract import Buckets
from weft.techniques.compression.contract import Compression
from weft.techniques.compute.contract import Compilation
from weft.techniques.context.contract import Context
from weft.techniques.contract import ExtraMemory, Technique
from weft.techniques.data.contract import Data
from weft.techniques.expert.contract import Expert
from weft.techniques.fused_loss.contract import FusedLoss
from weft.techniques.local_steps.contract import LocalSteps
from weft.techniques.offload.contract import Offloading
from weft.techniques.pipeline.contract import Pipeline
from weft.techniques.recompute.contract import Recomputation
from weft.techniques.tensor.contract import Tensor
from weft.techniques.zero.contract import Zero

TECHNIQUES: tuple[Technique, ...] = (
    Tensor(),
    Context(),
    Pipeline(),
    Expert(),
    Data(),
    Zero(),
    Buckets(),
    Compression(),
    LocalSteps(),
    Recomputation(),
    FusedLoss(),
    Offloading(),
    Compilation(),
)
"""All techniques, in the order in which they are checked, and in which ranks apply them."""


def running(plan: Plan) -> Iterator[str]:
    """Yield the modules that do on a rank what a plan's techniques do there (`Technique.runs`)."""
    for technique in TECHNIQUES:
        if technique.runs(plan):
            yield f"{type(technique).__module__.rpartition('.')[0]}.runtime"


def sending(plan: Plan) -> Iterator[str]:
    """Yield the modules that say what a plan's techniques send (`Technique.sends`)."""
    for technique in TECHNIQUES:
        if technique.sends(plan):
            yield f"{type(technique).__module__.rpartition('.')[0]}.program"


def of_keyword(name: str, value: Any) -> Mapping[str, Any]:
    """Return the settings that a keyword of `weft.session` stands for, by dotted key.

    Raises:
        PlanError: it is the keyword of a technique that this Weft has not got.
    """
    for technique in TECHNIQUES:
        if settings := technique.of_keyword(name, value):
            return settings
    known = ", ".join(technique.name for technique in TECHNIQUES)
    raise PlanError(f"{name} = {value!r} asks for a technique that this Weft does not have. It has {known}.")


def saved_states() -> tuple[str, ...]:
    """Return the keys under which a checkpoint may have states of techniques, whatever the plan that reads it."""
    return tuple(technique.saved_as for technique in TECHNIQUES if technique.saved_as)


def extra_memory(settings: Any) -> ExtraMemory:
    """Return what all techniques keep together, by the settings that `settings` has."""
    kept = [technique.extra_memory(settings) for technique in TECHNIQUES if isinstance(settings, technique.part)]
    return ExtraMemory(sum(one.gradient_bytes for one in kept), sum(one.master_copies for one in kept))


def update_seconds(settings: Any, state_bytes: float) -> float:
    """Return the seconds that a layout's techniques add to an optimizer's step over so many bytes."""
    mine = (technique for technique in TECHNIQUES if isinstance(settings, technique.part))
    return sum(technique.update_seconds(settings, state_bytes) for technique in mine)


def problems(settings: Any, *, on_cores: bool) -> Iterator[str]:
    """Yield what stands against a layout's techniques, whatever the model."""
    for technique in TECHNIQUES:
        if isinstance(settings, technique.part):
            yield from technique.problems(settings, on_cores=on_cores)


def describe(settings: Any) -> Iterator[str]:
    """Yield how a line about a layout names its techniques."""
    for technique in TECHNIQUES:
        if isinstance(settings, technique.part):
            yield from technique.describe(settings)


def lighter_settings(settings: Any) -> Iterator[str]:
    """Yield settings under which a rank of a layout would hold less, as a question spells them."""
    for technique in TECHNIQUES:
        if isinstance(settings, technique.part):
            yield from technique.lighter_settings(settings)


def unsupported_by_others(settings: Any) -> Iterator[str]:
    """Yield what no other system can be told of a layout's techniques."""
    for technique in TECHNIQUES:
        if isinstance(settings, technique.part):
            yield from technique.unsupported_by_others(settings)


def check_no_loop(plan: Plan) -> None:
    """Raise unless a plan can run in a loop that is not Weft's.

    Raises:
        PlanError: with every technique that needs Weft's own loop, and the change to make.
    """
    if reasons := [reason for technique in TECHNIQUES for reason in technique.needs_loop(plan)]:
        raise PlanError("\n".join(reasons))


def unsupported_in_script(plan: Plan) -> Iterator[str]:
    """Yield why no script of plain torch has a plan's techniques, with the changes to make."""
    for technique in TECHNIQUES:
        yield from technique.unsupported_in_script(plan)


def exact(plan: Plan) -> tuple[Plan, list[str]]:
    """Return the plan as it can be compared with one process, and what was left out."""
    notes: list[str] = []
    for technique in TECHNIQUES:
        plan, line = technique.exact(plan)
        notes += [line] if line else []
    return plan, notes
