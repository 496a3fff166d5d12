"""`weft metrics`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from weft.cli._options import FLAG
from weft.errors import LaunchError


def metrics(run: Path, /, *, to: str | None = None, follow: Annotated[bool, FLAG] = False) -> None:
    """Give a run's figures to a monitoring system, a tracker of experiments or a notebook, from its folder.

    The training knows nothing of it, and needs none of these libraries. Without --to, the figures of now are printed as
    Prometheus reads them.

    Parameters
    ----------
    run
        Folder of a run, live or finished.
    to
        prometheus:PORT answers scrapes of /metrics; otlp:URL sends to an OpenTelemetry collector; tensorboard:FOLDER,
        mlflow:URI (a server, or sqlite:///mlflow.db) and wandb:FOLDER (offline) take every step; parquet:FOLDER gets
        the whole record, a row per step and rank. Each is an extra: pip install "weft[tensorboard]".
    follow
        Go on while the run does; Parquet files are written when it ends.
    """
    from weft.watch.exporters import export, prometheus_text
    from weft.watch.run_record import RunRecord

    record = RunRecord(run)
    if to is None:
        if follow:
            raise LaunchError("--follow needs a target. Give one by --to, such as --to tensorboard:logs.")
        print(prometheus_text([record]), end="")
        return
    newest = export(record, to, follow=follow)
    print(f"{record.name}: exported up to step {newest:,} to {to}")
