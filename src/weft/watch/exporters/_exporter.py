"""What every exporter is, and how a run is exported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import Protocol

from weft.errors import LaunchError, did_you_mean
from weft.extensions import extensions_of, load_extension
from weft.watch.metrics import RunMetric, Scalar, run_metrics, scalars_of
from weft.watch.run_record import RunRecord

_PACKAGE = "weft.watch.exporters"


class Exporter(Protocol):
    """Takes the figures of one run."""

    def write(self, scalars: Iterable[Scalar], metrics: Callable[[], list[RunMetric]]) -> None:
        """Take the figures of new steps, or (by calling `metrics`) those of now."""
        ...

    def close(self) -> None:
        """Write what is still held."""
        ...


def open_exporter(target: str, record: RunRecord) -> Exporter:
    """Return the exporter of a target such as `tensorboard:FOLDER`.

    Raises:
        LaunchError: there is no such target, or its library is not installed.
    """
    kind, _, where = target.partition(":")
    known = extensions_of(_PACKAGE)
    if kind not in known or not where:
        hint = did_you_mean(kind, known)
        forms = ", ".join(f"{name}:{load_extension(_PACKAGE, name).WHERE}" for name in known)
        raise LaunchError(f"--to {target} is no target.{hint} Give one of {forms}.")
    exporter: Exporter = load_extension(_PACKAGE, kind).create(where, record)
    return exporter


def export(record: RunRecord, target: str, *, follow: bool = False, pause_seconds: float = 2.0) -> int:
    """Export a run, and return the newest step that was.  With `follow`, go on until the run has ended.

    Raises:
        LaunchError: see `open_exporter`.
    """
    exporter = open_exporter(target, record)
    newest = 0
    try:
        while True:
            exporter.write(scalars_of(record, newest), lambda: run_metrics(record))
            newest = max(newest, record.steps[-1].step if record.steps else 0)
            if not follow or record.state != "running":
                return newest
            time.sleep(pause_seconds)
            record.refresh()
    finally:
        exporter.close()


def load_library(module: str, extra: str) -> ModuleType:
    """Import a library that only an exporter needs.  Raises `LaunchError` with the command that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise LaunchError(
            f'{extra} is not installed (no module {error.name}). Install it: pip install "weft[{extra}]"'
        ) from None
