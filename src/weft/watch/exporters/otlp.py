"""OpenTelemetry: the figures of now, to a collector that takes OTLP over HTTP (`http://host:4318/v1/metrics`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from weft.errors import LaunchError
from weft.version import VERSION
from weft.watch.exporters._exporter import load_library
from weft.watch.metrics import RunMetric, Scalar
from weft.watch.run_record import RunRecord

WHERE = "URL"
_EXTRA = "otlp"


@final
class OtlpExporter:
    """Sets a gauge for every figure, and sends them when it is told new ones."""

    def __init__(self, reader: Any, name: str) -> None:
        """Take a reader of the OpenTelemetry SDK, which sends or keeps what is set here."""
        sdk: Any = load_library("opentelemetry.sdk.metrics", _EXTRA)
        resources: Any = load_library("opentelemetry.sdk.resources", _EXTRA)
        resource = resources.Resource.create({"service.name": "weft", "service.version": VERSION, "weft.run": name})
        self._provider = sdk.MeterProvider(metric_readers=[reader], resource=resource)
        self._meter = self._provider.get_meter("weft", VERSION)
        self._gauges: dict[str, Any] = {}

    def write(self, scalars: Iterable[Scalar], metrics: Callable[[], list[RunMetric]]) -> None:
        """See `Exporter`."""
        for metric in metrics():
            name = f"weft.{metric.name}"
            if name not in self._gauges:
                # A record that is read gives the sum itself, and no growth: also of sums a gauge.
                self._gauges[name] = self._meter.create_gauge(name, unit=metric.unit, description=metric.description)
            self._gauges[name].set(metric.value, dict(metric.attributes))
        if not self._provider.force_flush():
            raise LaunchError("The OpenTelemetry collector did not take the figures. Look whether it runs there.")

    def close(self) -> None:
        """See `Exporter`."""
        self._provider.shutdown()


def create(target: str, record: RunRecord) -> OtlpExporter:
    """See `weft.watch.exporters`."""
    if not target.startswith(("http://", "https://")):
        raise LaunchError(f"--to otlp:{target} is no URL. Write otlp:http://127.0.0.1:4318/v1/metrics.")
    sending: Any = load_library("opentelemetry.exporter.otlp.proto.http.metric_exporter", _EXTRA)
    export: Any = load_library("opentelemetry.sdk.metrics.export", _EXTRA)
    # It sends when it is flushed; a period of its own would send the same figures again.
    reader = export.PeriodicExportingMetricReader(sending.OTLPMetricExporter(target, timeout=5), float("inf"))
    return OtlpExporter(reader, record.name)
