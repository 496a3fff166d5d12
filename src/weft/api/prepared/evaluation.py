"""Runs a prepared model over a loader of the user's, in evaluation mode, under any plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from weft.api.batches.batch_shape import BatchShape, taken_apart
from weft.api.batches.batch_shares import gathers_samples, unequal
from weft.api.batches.losses import LossOfUser
from weft.api.batches.outputs import GatheredOutputs, Select
from weft.api.batches.stream import UserBatch, digest_of
from weft.api.ranks.agreement import check_same_facts, is_same
from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.errors import DataError, PlanError, RecipeError
from weft.model.blueprint import BATCH_NORMS, Blueprint
from weft.run.data import rank_range
from weft.techniques.core import Runner


@runtime_checkable
class Metric(Protocol):
    """A metric of `torchmetrics`, or one's own: it is updated batch by batch and computes in the end."""

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
        results: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            value = _alone(metric) if isinstance(metric, Metric) else metric(*_two(pairs))
            results[name] = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        return results


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


class Evaluation:
    """Pass without training: the runner, the loss that it calls, and this rank's share of a batch."""

    def __init__(
        self, runner: Runner, blueprint: Blueprint, loss: LossOfUser, mesh: Mesh, plan: Plan, recipe: Recipe
    ) -> None:
        self._runner, self._blueprint, self._loss = runner, blueprint, loss
        self._mesh, self._plan, self._seed = mesh, plan, recipe.run.seed
        self._batch_size = recipe.batch.global_batch_size
        # Fillers would count in statistics that ranks share.
        norms = (module for module in blueprint.module.named_modules() if isinstance(module[1], BATCH_NORMS))
        self._norm = next((name for name, norm in norms if norm.running_mean is None), "")
        self._start, self._stop = rank_range(plan.microbatch, plan.mesh.data, mesh.data_index)

    def outputs(self, select: Select) -> GatheredOutputs:
        """Return what collects the outputs of a pass.  Raises `PlanError` where no rank has whole ones."""
        if self._blueprint.vocabulary_head is not None and self._plan.mesh.tensor > 1:
            raise PlanError(
                f"under plan.mesh.tensor = {self._plan.mesh.tensor} each rank has a part of the logits of"
                f" {self._blueprint.vocabulary_head}, which prepare was told only a vocabulary loss reads, so there are"
                " none to be selected. Leave prepare's vocabulary_head= out."
            )
        return GatheredOutputs(select, self._mesh)

    def run_through(
        self, loader: Iterable[UserBatch], collected: GatheredOutputs | None, *, counts: bool
    ) -> Iterator[Tensor]:
        """Run the model over a loader; yield this rank's addends of (loss sum, count), (2,) float64, of at most one
        global batch each.  Without `counts` no loss is computed.  Call on every rank, and take all that it yields.

        Raises:
            DataError: on every rank; the loader gave other batches on other ranks, or none.
        """
        if not isinstance(cast(object, loader), Iterable):
            raise DataError(
                f"the loader is a {type(loader).__name__}, which yields no batches. Give a DataLoader, or a list of"
                " batches."
            )
        number = 0
        for number, batch in enumerate(loader, 1):
            fields, shape = taken_apart(batch)
            size = next(iter(fields.values())).shape[0]
            self._agree(number, f"{size} samples ({digest_of(fields)})")
            for at in range(0, size, self._batch_size):
                part = {name: value[at : at + self._batch_size] for name, value in fields.items()}
                yield self._run_share(part, shape, collected, counts=counts)
        self._agree(number + 1, "none, its end")
        if not number:
            raise DataError("the loader gave no batch, so there is nothing to run. Give it samples.")

    def _agree(self, number: int, batch: str) -> None:
        """Compare a batch over the ranks before anything is run: with other batches, or another number of them, they
        would wait for one another in the model, or a sample would count twice and another not at all."""
        world = self._mesh["world"]
        if world.group is None:
            return
        if not is_same(batch, self._mesh.device, world.group):
            facts = {f"data: batch {number - 1} of the loader that is run through": batch}
            check_same_facts(facts, self._mesh.device, world.group)

    def _run_share(
        self, fields: Mapping[str, Tensor], like: BatchShape, collected: GatheredOutputs | None, *, counts: bool
    ) -> Tensor:
        """Every rank runs as many microbatches as the largest share has, because gathers are collectives; where a rank
        has no samples left, it runs the batch's first one, which does not count."""
        self._loss.like = like
        micro, most = self._plan.microbatch.size, max(self._plan.microbatch.shares(self._plan.mesh.data))
        size = next(iter(fields.values())).shape[0]
        if gathers_samples(self._blueprint, self._plan) or (self._norm and self._plan.mesh.data > 1):
            return self._run_equal_share(fields, size, collected, counts=counts)
        own = range(min(self._start, size), min(self._stop, size), micro)
        fields = {**fields, "sample_ids": torch.arange(size)}
        cut = [{name: value[at : min(at + micro, self._stop)] for name, value in fields.items()} for at in own]
        fill = [{name: value[:1] for name, value in fields.items()}] * (most - len(cut))
        totals = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        if cut:
            look = collected.look if collected is not None else _nothing
            with self._loss.watched(look, counts=counts):
                totals += self._runner.evaluate(cut, step=0, seed=self._seed).addend(self._mesh)
        if fill:
            with self._loss.watched(_nothing, counts=counts):
                self._runner.evaluate(fill, step=0, seed=self._seed)
        return totals

    def _run_equal_share(
        self, fields: Mapping[str, Tensor], size: int, collected: GatheredOutputs | None, *, counts: bool
    ) -> Tensor:
        """Where ranks gather their samples for the loss, or a batch norm has no statistics but the batch's, each has
        equally many.

        Raises:
            DataError: on every rank; the batch cannot be shared out so.
        """
        each, rest = divmod(size, self._plan.mesh.data)
        if rest:
            raise DataError(unequal(size, self._plan.mesh.data, self._norm))
        start = self._mesh.data_index * each
        fields = {**fields, "sample_ids": torch.arange(size)}
        part = {name: value[start : start + each] for name, value in fields.items()}
        with self._loss.watched(collected.look if collected is not None else _nothing, counts=counts):
            return self._runner.evaluate([part], step=0, seed=self._seed).addend(self._mesh)


def _nothing(outputs: Any, batch: Any) -> None:
    """Look at nothing."""
