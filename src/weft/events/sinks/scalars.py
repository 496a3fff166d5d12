"""Numbers of a run by name and step: what trackers of experiments take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.events._events import CollectiveEvent, EvaluationEvent, Event, PhaseEvent, RateEvent, StepEvent
from weft.events._run import Emitted
from weft.events._sinks import Listening, Track

_OF_STEPS = ("loss", "gradient_norm", "learning_rate", "loss_scale", "num_skipped", "memory_bytes")
_OF_RATES = ("samples_per_second", "tokens_per_second", "flops_per_second", "peak_share")


class ScalarSink:
    """Gives every number that a run reports to `track`, by names such as `train/loss` and `evaluation/accuracy`.

    `prefix` stands before all names.  Numbers that are not known yet, such as rates of the first steps, are left out;
    a `nan` is one, and is given.
    """

    def __init__(self, track: Track, prefix: str = "") -> None:
        self._track, self._prefix = track, prefix

    def take(self, emitted: Emitted) -> None:
        """See `Sink`."""
        event = emitted.event
        step = getattr(event, "step", 0)
        for name, value in _scalars(event):
            if value is not None:
                self._track(f"{self._prefix}{name}", float(value), step)

    def close(self) -> None:
        """Nothing is held; a tracker is closed by whoever opened it."""


def _scalars(event: Event) -> Iterator[tuple[str, float | None]]:
    match event:
        case StepEvent():
            yield from ((f"train/{name}", getattr(event, name)) for name in _OF_STEPS)
            yield from _below("train", event.auxiliary)
            yield from ((f"train/largest_load/{name}", max(load)) for name, load in event.load.items())
            yield from _below("train/router_entropy", event.router_entropy)
        case EvaluationEvent():
            yield "evaluation/loss", event.validation_loss
            yield from _below("evaluation", event.metrics)
        case PhaseEvent():
            yield from _below("seconds", {name: value / event.num_steps for name, value in event.seconds.items()})
        case RateEvent():
            yield from ((f"rate/{name}", getattr(event, name)) for name in _OF_RATES)
        case CollectiveEvent():
            yield f"communication/{event.axis}/bytes", event.num_bytes / event.num_steps
            yield f"communication/{event.axis}/exposed_seconds", event.exposed_seconds / event.num_steps
        case _:
            return


def _below(group: str, values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    return ((f"{group}/{name.removesuffix('_seconds')}", value) for name, value in values.items())


def create(run: Listening) -> ScalarSink | None:
    """See `weft.events.sinks`."""
    return ScalarSink(run.track, run.track_prefix) if run.track is not None and run.rank == 0 else None
