"""Weights & Biases, offline: a folder that `wandb sync` uploads when its owner wants to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, final

from weft.watch.exporters._exporter import load_library
from weft.watch.metrics import RunMetric, Scalar
from weft.watch.run_record import RunRecord

WHERE = "FOLDER"


@final
class WandbExporter:
    """Logs the figures of a step together; nothing leaves this machine."""

    def __init__(self, folder: str, record: RunRecord) -> None:
        wandb: Any = load_library("wandb", "wandb")
        Path(folder).mkdir(parents=True, exist_ok=True)
        # No console, machine statistics or source: those of this process are none of the run's.
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
        config = {"ranks": record.num_ranks, "plan": record.facts.plan_digest}
        self._run: Any = wandb.init(
            mode="offline", dir=folder, project="weft", name=record.name, config=config, settings=settings
        )

    def write(self, scalars: Iterable[Scalar], metrics: Callable[[], list[RunMetric]]) -> None:
        """See `Exporter`."""
        ordered = sorted(scalars, key=lambda scalar: scalar.step)
        for step, found in groupby(ordered, key=lambda scalar: scalar.step):
            rows = list(found)
            self._run.log({"_timestamp": rows[0].unix_time, **{row.name: row.value for row in rows}}, step=step)

    def close(self) -> None:
        """See `Exporter`."""
        self._run.finish()


def create(target: str, record: RunRecord) -> WandbExporter:
    """See `weft.watch.exporters`."""
    return WandbExporter(target, record)
