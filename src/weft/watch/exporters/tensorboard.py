"""TensorBoard: an event file that it draws while it grows.  Needs no TensorFlow and no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from weft.watch.exporters._exporter import load_library
from weft.watch.metrics import RunMetric, Scalar
from weft.watch.run_record import RunRecord

WHERE = "FOLDER"


@final
class TensorBoardExporter:
    """Writes one event per figure and step."""

    def __init__(self, folder: str, name: str) -> None:
        writer: Any = load_library("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event: Any = load_library("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary: Any = load_library("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._writer = writer.EventFileWriter(f"{folder}/{name}")

    def write(self, scalars: Iterable[Scalar], metrics: Callable[[], list[RunMetric]]) -> None:
        """See `Exporter`."""
        for scalar in scalars:
            value = self._summary.Value(tag=scalar.name, simple_value=scalar.value)
            summary = self._summary(value=[value])
            self._writer.add_event(self._event(wall_time=scalar.unix_time, step=scalar.step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """See `Exporter`."""
        self._writer.close()


def create(target: str, record: RunRecord) -> TensorBoardExporter:
    """See `weft.watch.exporters`."""
    return TensorBoardExporter(target, record.name)
