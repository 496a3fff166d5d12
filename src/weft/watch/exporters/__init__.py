"""Targets of a run's figures, a file each with `WHERE` and a function `create(target: str, record) -> Exporter`."""

from weft.watch.exporters._exporter import Exporter as Exporter
from weft.watch.exporters._exporter import export as export
from weft.watch.exporters._exporter import open_exporter as open_exporter
from weft.watch.exporters.prometheus import prometheus_text as prometheus_text
