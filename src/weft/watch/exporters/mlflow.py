"""MLflow: a run of the experiment `weft`, on a tracking server or in a local file (`sqlite:///mlflow.db`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, final

from weft.watch.exporters._exporter import load_library
from weft.watch.metrics import RunMetric, Scalar
from weft.watch.run_record import RunRecord

WHERE = "URI"
_BATCH = 1000
"""Most metrics that MLflow takes in one call."""
_EXPERIMENT = "weft"


@final
class MlflowExporter:
    """Adds every figure to one MLflow run of the same name as the run's folder."""

    def __init__(self, uri: str, record: RunRecord) -> None:
        self._entities: Any = load_library("mlflow.entities", "mlflow")
        tracking: Any = load_library("mlflow.tracking", "mlflow")
        self._client: Any = tracking.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(_EXPERIMENT)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(_EXPERIMENT)
        self._run: str = self._client.create_run(experiment, run_name=record.name).info.run_id
        for name, value in (("ranks", record.num_ranks), ("plan", record.facts.plan_digest)):
            self._client.log_param(self._run, name, value)

    def write(self, scalars: Iterable[Scalar], metrics: Callable[[], list[RunMetric]]) -> None:
        """See `Exporter`."""
        rest = iter(scalars)
        while batch := list(islice(rest, _BATCH)):
            values = [
                self._entities.Metric(scalar.name, scalar.value, round(1000 * scalar.unix_time), scalar.step)
                for scalar in batch
            ]
            self._client.log_batch(self._run, metrics=values)

    def close(self) -> None:
        """See `Exporter`."""
        self._client.set_terminated(self._run)


def create(target: str, record: RunRecord) -> MlflowExporter:
    """See `weft.watch.exporters`."""
    return MlflowExporter(target, record)
