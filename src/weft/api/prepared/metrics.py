"""Metrics of an evaluation: exact, because every rank computes them of all samples, each counted once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from weft.errors import RecipeError


@runtime_checkable
class Metric(Protocol):
    """What is told of batches and computes in the end: a metric of `torchmetrics`, or one's own."""

    def update(self, predictions: Any, targets: Any) -> Any: ...

    def compute(self) -> Any: ...


class Metrics:
    """Metrics by name: each an object with `update` and `compute`, or a function of all predictions and targets."""

    def __init__(self, metrics: object = None, outputs: object = None) -> None:
        """`outputs` is what selects predictions and targets, which nothing but a metric reads."""
        if metrics is not None and not isinstance(metrics, Mapping):
            raise RecipeError(
                f"metrics is a {type(metrics).__name__}. Give a dictionary of names: metrics={{'accuracy': …}}."
            )
        metrics = cast(Mapping[str, Any], metrics or {})
        if outputs is not None and not metrics:
            raise RecipeError(
                "outputs= selects what metrics are told, and there are none. Give metrics=, or leave it out."
            )
        for name, metric in metrics.items():
            if not isinstance(cast(object, name), str) or not name:
                raise RecipeError(f"a metric is called {name!r}. Give it a name, which stands in the run's records.")
            if isinstance(metric, type):
                raise RecipeError(f"the metric {name!r} is the class {metric.__name__}. Give one that was made of it.")
            if not isinstance(metric, Metric) and not callable(metric):
                raise RecipeError(
                    f"the metric {name!r} is a {type(metric).__name__}. Give a function of (predictions, targets), or"
                    " an object with update(predictions, targets) and compute(), such as a metric of torchmetrics."
                )
            if name == "loss":
                raise RecipeError('a metric is called "loss", as the mean loss is. Give it another name.')
        self.names = tuple(metrics)
        self._metrics = dict(metrics)
        self._told = [metric for metric in metrics.values() if isinstance(metric, Metric)]
        for metric in self._told:
            _call_if_there(metric, "reset")

    def update(self, pairs: Any) -> None:
        """Tell the metrics of one batch's predictions and targets."""
        for metric in self._told:
            metric.update(*_two(pairs))

    def compute(self, pairs: Any) -> dict[str, Any]:
        """Return the values; `pairs` are all predictions and targets."""
        found: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            value = _alone(metric) if isinstance(metric, Metric) else metric(*_two(pairs))
            found[name] = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        return found


def _alone(metric: Metric) -> Any:
    """The metric's value without asking other ranks, which have seen the same."""
    asks = getattr(metric, "sync_on_compute", None)
    if asks is None:
        return metric.compute()
    setattr(metric, "sync_on_compute", False)  # noqa: B010  # an attribute that torchmetrics has
    try:
        return metric.compute()
    finally:
        setattr(metric, "sync_on_compute", asks)  # noqa: B010


def _two(pairs: Any) -> tuple[Any, Any]:
    if not isinstance(pairs, tuple) or len(cast(tuple[Any, ...], pairs)) != 2:
        raise RecipeError(
            "the function that selects outputs for metrics must return (predictions, targets). Write"
            ' outputs=lambda outputs, batch: (outputs.logits.argmax(-1), batch["labels"]).'
        )
    return cast(tuple[Any, Any], pairs)


def _call_if_there(metric: object, name: str) -> None:
    method = getattr(metric, name, None)
    if callable(method):
        method()
