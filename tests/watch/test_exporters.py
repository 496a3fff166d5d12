"""A run's figures reach Prometheus, OpenTelemetry, TensorBoard, MLflow and Weights & Biases, and are read there."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from recorded_runs import MadeUpRun

from weft.cli import build_app
from weft.errors import LaunchError
from weft.watch.exporters import export, open_exporter, prometheus_text
from weft.watch.exporters.otlp import OtlpExporter
from weft.watch.exporters.prometheus import PrometheusExporter
from weft.watch.metrics import run_metrics, scalars_of
from weft.watch.run_record import RunRecord
from weft.watch.store import Gap


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    """A run of two stages whose rank 2 is slow."""
    run = MadeUpRun(folder=tmp_path / 'a "run"', data=2, pipeline=2, slow={(2, "forward"): 0.03})
    run.add(40)
    run.writer.gap(Gap(1, 2, 40, 1.0, 10, 3, 0, "the ring was full"))
    run.event("evaluation", step=30, validation_loss=4.5, seconds=1.0)
    run.end()
    return RunRecord(run.folder)


def losses(record: RunRecord) -> dict[int, float]:
    return {row.step: row.loss for row in record.steps if row.loss is not None}


# ── Prometheus ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_prometheus_reads_names_units_and_labels(record: RunRecord) -> None:
    families = {family.name: family for family in text_string_to_metric_families(prometheus_text([record]))}
    samples = {
        (sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "run")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert {sample.labels["run"] for family in families.values() for sample in family.samples} == {'a "run"'}
    assert samples["weft_step_number",] == 40
    assert samples["weft_training_loss",] == pytest.approx(losses(record)[40])
    assert samples["weft_step_duration_seconds", "median"] == pytest.approx(0.11, rel=0.1)
    assert samples["weft_telemetry_dropped_total", "spans"] == 10
    assert families["weft_telemetry_dropped"].type == "counter"
    assert samples["weft_comm_io_bytes", "data", "all_reduce"] == 8_000_000
    assert samples["weft_memory_usage_bytes", "parameters"] == 4_000_000
    assert samples["weft_verdict_cost_seconds", "", "slow_rank", "forward", "2"] == pytest.approx(0.03, rel=0.1)
    frontier = sum(value for name, value in samples.items() if name[0] == "weft_frontier_time_seconds")
    assert frontier == pytest.approx(samples["weft_step_duration_seconds", "median"], rel=0.03)
    states = [value for name, value in samples.items() if name[:2] == ("weft_rank_time_seconds", "median")]
    assert sum(states) == pytest.approx(frontier, rel=0.1)
    assert not any("rank" in sample.labels for family in families.values() for sample in family.samples)


def test_figures_are_few_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    sizes: list[int] = []
    for data in (2, 64):
        run = MadeUpRun(folder=tmp_path / str(data), data=data)
        run.add(30)
        sizes.append(len(run_metrics(RunRecord(run.folder))))
    assert sizes[0] == sizes[1]


@contextmanager
def scraped(record: RunRecord) -> Iterator[PrometheusExporter]:
    exporter = open_exporter("prometheus:0", record)
    assert isinstance(exporter, PrometheusExporter)
    thread = threading.Thread(target=exporter.server.serve_forever)
    thread.start()
    try:
        yield exporter
    finally:
        exporter.server.shutdown()
        thread.join()
        exporter.close()


def ask(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()


def test_a_scrape_reads_the_run_anew(record: RunRecord) -> None:
    with scraped(record) as exporter:
        assert "weft_step_number{" in ask(exporter.url)
        with pytest.raises(urllib.error.HTTPError):
            ask(exporter.url.replace("/metrics", "/etc"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LaunchError, match="another port"):
        open_exporter(f"prometheus:{taken.getsockname()[1]}", record)


@pytest.mark.needs_prometheus
def test_a_real_prometheus_scrapes_it(record: RunRecord, tmp_path: Path) -> None:
    text = prometheus_text([record])
    promtool = shutil.which("promtool")
    assert promtool is not None
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with scraped(record) as exporter:
        config = tmp_path / "prometheus.yml"
        target = exporter.url.removeprefix("http://").removesuffix("/metrics")
        config.write_text(
            json.dumps(
                {
                    "scrape_configs": [
                        {
                            "job_name": "weft",
                            "scrape_interval": "200ms",
                            "scrape_timeout": "200ms",
                            "static_configs": [{"targets": [target]}],
                        }
                    ]
                }
            )  # fmt: skip
        )
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
                   f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
        with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                found = _query(f"http://127.0.0.1:{port}/api/v1/query?query=weft_step_number")
            finally:
                process.terminate()
    assert found[0]["metric"]["run"] == 'a "run"'
    assert found[0]["value"][1] == "40"


def _query(url: str, seconds: float = 20.0) -> list[dict[str, dict[str, str]]]:
    """Ask until there is an answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            result = json.loads(ask(url))["data"]["result"]
        except OSError:
            result = []
        if result:
            return result
        time.sleep(0.1)
    raise AssertionError("Prometheus has scraped nothing")


# ── OpenTelemetry ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_opentelemetry_has_names_and_units(record: RunRecord) -> None:
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    exporter = OtlpExporter(reader, record.name)
    exporter.write((), lambda: run_metrics(record))
    (found,) = json.loads(reader.get_metrics_data().to_json())["resource_metrics"]
    exporter.close()
    assert found["resource"]["attributes"]["weft.run"] == 'a "run"'
    metrics = {metric["name"]: metric for metric in found["scope_metrics"][0]["metrics"]}
    assert metrics["weft.step.duration"]["unit"] == "s"
    points = metrics["weft.step.duration"]["data"]["data_points"]
    assert {point["attributes"]["stat"] for point in points} == {"median", "p95", "most"}


def test_opentelemetry_is_sent_to_a_collector(record: RunRecord) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    taken: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        export(record, f"otlp:http://127.0.0.1:{server.server_port}/v1/metrics")
        server.shutdown()
        thread.join()
    request = ExportMetricsServiceRequest.FromString(taken[0])
    sent = {metric.name for part in request.resource_metrics[0].scope_metrics for metric in part.metrics}
    assert {"weft.step.duration", "weft.training.loss", "weft.comm.io"} <= sent
    with pytest.raises(LaunchError, match="is no URL"):
        open_exporter("otlp:somewhere", record)


# ── trackers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_tensorboard(folder: Path, record: RunRecord) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / record.name))
    accumulator.Reload()
    assert {"state/compute", "communication/data/exposed", "evaluation/loss"} <= set(accumulator.Tags()["scalars"])
    return {event.step: event.value for event in accumulator.Scalars("train/loss")}


def read_mlflow(folder: Path, record: RunRecord) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("weft")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == record.name
    assert run.info.status == "FINISHED"
    return {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}


def read_wandb(folder: Path, record: RunRecord) -> dict[int, float]:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("*.wandb")
    found: dict[int, float] = {}
    for content in wandb_records(path.read_bytes()):
        history = Record.FromString(content).history
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in history.item}
        if "train/loss" in values:
            found[history.step.num] = values["train/loss"]
    return found


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Records of an offline run: LevelDB's log in blocks of 32 KiB behind seven bytes, of which the last may be less
    than a header; a record is whole (1), or in a first (2), middle (3) and last part (4)."""
    at, block, parts = 7, 32 << 10, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


TRACKERS: dict[str, tuple[str, Callable[[Path, RunRecord], dict[int, float]]]] = {
    "tensorboard": ("tensorboard:{}", read_tensorboard),
    "mlflow": ("mlflow:sqlite:///{}/mlflow.db", read_mlflow),
    "wandb": ("wandb:{}", read_wandb),
}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_takes_every_step(record: RunRecord, tmp_path: Path, tracker: str) -> None:
    target, read = TRACKERS[tracker]
    folder = tmp_path / "tracked"
    folder.mkdir()
    # In a process of its own, as a user's: these libraries leave threads and settings behind.
    command = [sys.executable, "-m", "weft.cli", "metrics", str(record.folder.path), "--to", target.format(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "exported up to step 40" in done.stdout
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what these libraries use of one another
        found = read(folder, record)
    assert found == pytest.approx(losses(record), rel=1e-6)


def test_a_living_run_is_followed_and_no_step_is_given_twice(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run")
    run.add(10)
    record = RunRecord(run.folder)
    first = [scalar for scalar in scalars_of(record) if scalar.name == "train/loss"]
    run.add(5)
    record.refresh()
    second = [scalar for scalar in scalars_of(record, 10) if scalar.name == "train/loss"]
    assert [scalar.step for scalar in [*first, *second]] == list(range(1, 16))
    assert all(earlier.unix_time < later.unix_time for earlier, later in zip(first, first[1:], strict=False))


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_prints_what_prometheus_reads(record: RunRecord, capsys: pytest.CaptureFixture[str]) -> None:
    app = build_app()
    command = ["metrics", str(record.folder.path)]
    app(command, exit_on_error=False, result_action="return_value")
    assert list(text_string_to_metric_families(capsys.readouterr().out))
    for more, said in (
        (["--to", "tensorbord:x"], "Did you mean tensorboard"),
        (["--to", "tensorboard"], "tensorboard:FOLDER"),
        (["--follow"], "--follow needs a target"),
    ):
        with pytest.raises(LaunchError, match=said):
            app([*command, *more], exit_on_error=False, result_action="return_value")


def test_a_library_that_is_not_installed_is_named_with_its_extra(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(LaunchError, match=r'pip install "weft\[wandb\]"'):
        open_exporter("wandb:x", record)
