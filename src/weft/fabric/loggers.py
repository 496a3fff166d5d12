"""Fabric's loggers: numbers of a run as a CSV file, or for TensorBoard.  Only rank 0 writes."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.errors import RecipeError
from weft.fabric.utilities.rank_zero import rank_zero_only


class Logger:
    """Base of a script's own logger: it has `log_metrics`, and any further method of its own."""

    name: Any = None
    version: Any = None
    root_dir: Any = None
    log_dir: Any = None
    group_separator = "/"

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Take numbers of a step."""
        raise NotImplementedError(f"{type(self).__name__} takes no numbers")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Take settings of the run."""
        raise RecipeError(f"{type(self).__name__} keeps no settings. Leave log_hyperparams out.")

    def save(self) -> None:
        """Write what was taken: nothing waits here."""

    def finalize(self, status: str) -> None:
        """End the run."""
        del status
        self.save()


class InFolder(Logger):
    """A logger that writes below `root_dir/name/version_N`."""

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        **options: Any,
    ) -> None:
        self.root_dir, self.name, self._prefix, self._options = os.fspath(root_dir), name or "", prefix, options
        before = [each.name.removeprefix("version_") for each in Path(self.root_dir, self.name).glob("version_*")]
        last = max((int(folder) for folder in before if folder.isdigit()), default=-1)
        self.version = last + 1 if version is None else version

    @property
    def log_dir(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Folder of this run."""
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return str(Path(self.root_dir, self.name, version))

    def _named(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        first = f"{self._prefix}-" if self._prefix else ""
        return {
            first + name: metric.item() if isinstance(metric, Tensor) else metric for name, metric in metrics.items()
        }


class CSVLogger(InFolder):
    """Writes `metrics.csv`, with a row for each call, every `flush_logs_every_n_steps` calls."""

    @cached_property
    def experiment(self) -> _CsvRows:
        """The object that holds the rows."""
        return _CsvRows(Path(self.log_dir, "metrics.csv"))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        step = len(self.experiment.metrics) if step is None else step
        self.experiment.metrics.append({**self._named(metrics), "step": step})
        if (step + 1) % self._options.get("flush_logs_every_n_steps", 100) == 0:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        self.experiment.save()


class _CsvRows:
    """Rows of a CSV file, of which a script may look at those that are not written yet."""

    def __init__(self, path: Path) -> None:
        self.metrics: list[dict[str, Any]] = []
        self._columns: list[str] = []
        self._path = path

    def save(self) -> None:
        columns = sorted({*self._columns, *(name for row in self.metrics for name in row)})
        rows, goes_on = self.metrics, columns == self._columns
        if self._columns and not goes_on:
            with self._path.open(newline="") as file:
                rows = [*csv.DictReader(file), *rows]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a" if goes_on else "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            if not goes_on:
                writer.writeheader()
            writer.writerows(rows)
        self._columns, self.metrics = columns, []


class TensorBoardLogger(InFolder):
    """Writes what TensorBoard shows; further options are its writer's."""

    _next = 0

    @cached_property
    def experiment(self) -> Any:
        """TensorBoard's own writer."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RecipeError(
                "TensorBoardLogger needs tensorboard, which is not installed. `pip install tensorboard`, or CSVLogger."
            ) from None
        return SummaryWriter(self.log_dir, **self._options)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        step = self._next if step is None else step
        for name, value in self._named(metrics).items():
            self.experiment.add_scalar(name, value, step)
        self._next = step + 1

    @rank_zero_only
    def save(self) -> None:
        self.experiment.flush()
