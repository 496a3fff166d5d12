"""Prometheus: a run's figures as the text that it scrapes, and a small server of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import final

from weft.errors import LaunchError
from weft.watch.metrics import RunMetric, Scalar, run_metrics
from weft.watch.run_record import RunRecord

WHERE = "[HOST:]PORT"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UNITS = {"s": "_seconds", "By": "_bytes", "1": "_ratio", "{sample}/s": "_per_second", "{token}/s": "_per_second"}
_PLAIN = ("training.", "run.running")
"""Names of numbers without a unit that are no ratio."""


def prometheus_text(records: Sequence[RunRecord]) -> str:
    """Return the figures of runs in Prometheus's text format, version 0.0.4; each run has a label `run`."""
    families: dict[str, tuple[RunMetric, list[str]]] = {}
    for record in records:
        for metric in run_metrics(record):
            name = _name(metric)
            labels = {"run": record.name, **metric.attributes}
            text = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
            families.setdefault(name, (metric, []))[1].append(f"{name}{{{text}}} {float(metric.value)!r}")
    lines: list[str] = []
    for name, (metric, samples) in families.items():
        kind = "counter" if metric.is_sum else "gauge"
        lines += [f"# HELP {name} {metric.description}", f"# TYPE {name} {kind}", *samples]
    return "\n".join(lines) + "\n"


def _name(metric: RunMetric) -> str:
    plain = metric.unit == "1" and metric.name.startswith(_PLAIN) and not metric.name.endswith("share")
    unit = "" if plain else _UNITS.get(metric.unit, "")
    return "weft_" + re.sub(r"\W", "_", metric.name) + unit + ("_total" if metric.is_sum else "")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@final
class PrometheusExporter:
    """Answers `/metrics` until Ctrl-C, and reads the run's folder anew for each scrape."""

    def __init__(self, host: str, port: int, record: RunRecord) -> None:
        class Handler(BaseHTTPRequestHandler):
            """Answers one request."""

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "only /metrics is here")
                    return
                record.refresh()
                content = prometheus_text([record]).encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are no news."""

        try:
            self.server = HTTPServer((host, port), Handler)
        except OSError as error:
            raise LaunchError(f"{host}:{port} cannot be listened on: {error.strerror}. Give another port.") from None
        self.url = f"http://{host}:{self.server.server_port}/metrics"

    def write(self, scalars: Iterable[Scalar], metrics: Callable[[], list[RunMetric]]) -> None:
        """See `Exporter`.  It serves until it is stopped."""
        print(f"{self.url} is ready to be scraped; Ctrl-C ends it.", flush=True)
        self.server.serve_forever()

    def close(self) -> None:
        """See `Exporter`."""
        self.server.server_close()


def create(target: str, record: RunRecord) -> PrometheusExporter:
    """See `weft.watch.exporters`."""
    host, _, port = target.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise LaunchError(f"--to prometheus:{target} has no port. Write prometheus:9464.")
    return PrometheusExporter(host or "127.0.0.1", int(port), record)
