"""Events in words, the same on the terminal and in a log."""

from __future__ import annotations

import math

from weft.events._events import (
    CheckpointEvent,
    EvaluationEvent,
    Event,
    FailureEvent,
    GenerationEvent,
    MessageEvent,
    StepEvent,
    WarningEvent,
)


def text_of(event: Event) -> str | None:
    """Return what is worth a line of its own; None for what is only counted, such as a step that went well."""
    match event:
        case MessageEvent(text=text) | WarningEvent(text=text):
            return text
        case FailureEvent(error=error, text=text, rank=rank, host=host):
            return text if text.startswith(f"rank {rank} ") else f"rank {rank} on host {host} stopped: {error}: {text}"
        case GenerationEvent():
            return _of_generation(event)
        case EvaluationEvent(step=step, validation_loss=loss):
            return f"step {step:4d}  validation loss {format_loss(loss)}"
        case CheckpointEvent(step=step, path=path, problem=problem):
            return f"warning: {problem} Training goes on." if problem else f"step {step:4d}  saved {path}"
        case StepEvent(skipped=True):
            scale = f", loss scale {event.loss_scale:g}" if event.loss_scale != 1.0 else ""
            return (
                f"step {event.step} skipped on all ranks: loss {event.loss}, gradient norm {event.gradient_norm}{scale}"
            )
        case _:
            return None


def _of_generation(event: GenerationEvent) -> str:
    ranks = f"{event.world_size} ranks go on" if event.world_size != 1 else "1 rank goes on"
    if event.failure == "replan":
        return f"replan    generation {event.number}: {ranks} from step {event.restored_step}, {event.cause}"
    again = max(0, event.failed_step - 1 - event.restored_step)
    if event.restored_step:
        goes_on = f"{ranks} from step {event.restored_step}"
    else:
        ranks = ranks.replace("go on", "begin anew").replace("goes on", "begins anew")
        goes_on = f"{ranks}, since nothing is saved yet" if again else ranks
    repeated = f", {again} step{'s' if again != 1 else ''} again" if again else ""
    if event.plan_change:
        return f"shrink    generation {event.number}: {goes_on}{repeated}, {event.plan_change}"
    return f"restart   generation {event.number}: {goes_on}{repeated}"


def format_loss(loss: float) -> str:
    """Three decimals where they say something, else three digits and an exponent; `nan` and `inf` as they are."""
    if loss == 0 or not math.isfinite(loss) or 0.01 <= abs(loss) < 10_000:
        return f"{loss:.3f}"
    return f"{loss:.2e}"


def format_duration(seconds: float) -> str:
    """`42s`, `3m10s`, `5h07m`, `2d03h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(whole / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(whole / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"
