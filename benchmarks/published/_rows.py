"""Published runs as rows of a CSV file: what was run, and apart from it what was measured."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.errors import DataError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was run: everything that a prediction may read.  None: the source does not say."""

    index: int
    """0-based among the rows of its file."""
    family: str
    """Author of the run."""
    source: str
    """Document or file, and where in it."""
    model: str
    parameters_billion: float | None
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    vocabulary: int | None
    sequence_length: int | None
    experts: int | None
    top_k: int | None
    device: str
    """Name as the source calls it."""
    devices_per_node: int | None
    """Devices that share the fast links."""
    inside_gigabytes: float | None
    """Gigabytes per second, one way, of one device."""
    between_gigabits: float | None
    """Gigabits per second of one node."""
    devices: int | None
    data: int | None
    tensor: int | None
    sequence_parallel: bool | None
    pipeline: int | None
    chunks: int | None
    context: int | None
    expert: int | None
    zero: int | None
    microbatch: int | None
    """Sequences of one microbatch on one data rank."""
    global_batch: int | None
    """Sequences of one step, all ranks."""
    recompute: str | None
    precision: str | None
    schedule: str | None
    """Schedule of the pipeline, in the source's words."""
    attention: str | None
    """`fused`, or `unfused` where scores are written to memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured.  No prediction reads it."""

    step_seconds: float | None = None
    tokens_per_second: float | None = None
    """Throughput of one device."""
    model_teraflops: float | None = None
    """Rate of one device, recomputation not counted, in the source's own convention."""
    hardware_teraflops: float | None = None
    """Rate of one device, recomputation counted."""
    utilization: float | None = None
    """Share of the device's peak, in the source's own convention."""
    peak_gibibytes: float | None = None
    out_of_memory: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file."""

    run: Run
    measured: Measured
    use: str
    """`calibrate`, or `context` for rows of low trust."""


RUN_COLUMNS = (
    "source_family", "source", "model", "params_b", "n_layers", "hidden", "heads", "kv_heads", "ffn", "vocab",
    "seq_len", "n_experts", "top_k", "gpu", "gpus_per_node", "intra_bw_GBps", "inter_bw_Gbps", "n_gpus", "dp",
    "tp", "sp", "pp", "vpp", "cp", "ep", "zero_stage", "micro_batch", "global_batch", "recompute", "dtype",
)  # fmt: skip
"""Columns that a prediction reads."""
MEASURED_COLUMNS = (
    "step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "hw_tflops_per_gpu", "mfu", "peak_mem_gib", "note",
)  # fmt: skip
"""Columns that no prediction reads; a file may lack them."""
PUBLISHED_RUNS = Path(__file__).parent / "data" / "published_runs.csv"
"""The runs that constants are fitted on."""
FURTHER_COLUMNS = ("schedule", "attention")
"""Columns that a prediction reads where a file has them."""
_ABSENT_ALLOWED = ("source_family", "source")
_MAY_BE_ZERO = ("sp", "zero_stage", "n_experts", "top_k")


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read published runs from a CSV file with a header line.

    Raises:
        DataError: the file cannot be read, lacks a column, has no row, or a cell is no number where one belongs.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            _check_header(path, reader.fieldnames or ())
            rows = tuple(_row(_Cells(path, index, texts)) for index, texts in enumerate(reader))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Name a CSV file of published runs.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is no CSV text: {error}. Save it as UTF-8 with commas between the cells.") from None
    if not rows:
        raise DataError(f"{path} has a header line but no row. Add one line per run.")
    return rows


def _check_header(path: Path, header: Sequence[str]) -> None:
    """Refuse a file whose header lacks columns that a prediction needs."""
    missing = [name for name in RUN_COLUMNS if name not in header and name not in _ABSENT_ALLOWED]
    if not header:
        raise DataError(f"{path} is empty. Its first line must name the columns: {', '.join(RUN_COLUMNS)}.")
    if missing:
        hint = did_you_mean(missing[0], [name for name in header if name not in RUN_COLUMNS])
        raise DataError(
            f"{path} lacks {len(missing)} of the columns that a run needs: {', '.join(missing)}.{hint}"
            " Add them; a cell may be empty where the source says nothing."
        )


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of one line."""

    path: Path
    index: int
    texts: Mapping[str, str | None]

    def text(self, name: str) -> str:
        return (self.texts.get(name) or "").strip()

    def number(self, name: str) -> float | None:
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise self._refuse(name, "no number of at least 0. Write a plain number")
        return value

    def count(self, name: str) -> int | None:
        value = self.number(name)
        if value is None:
            return None
        if value != int(value) or (value == 0 and name not in _MAY_BE_ZERO):
            raise self._refuse(name, "no whole number above 0. Write one")
        return int(value)

    def _refuse(self, name: str, problem: str) -> DataError:
        return DataError(
            f'{self.path}, row {self.index} (line {self.index + 2}): {name} = "{self.text(name)}" is {problem},'
            " or leave the cell empty where the source says nothing."
        )


def _row(cells: _Cells) -> Row:
    return Row(_run(cells), _measured(cells), cells.text("use") or "calibrate")


def _run(cells: _Cells) -> Run:
    sequence_parallel = cells.count("sp")
    source = cells.text("source")
    return Run(
        index=cells.index,
        family=cells.text("source_family") or (source.split() or ["unknown"])[0],
        source=source,
        model=cells.text("model"),
        parameters_billion=cells.number("params_b"),
        layers=cells.count("n_layers"),
        hidden=cells.count("hidden"),
        heads=cells.count("heads"),
        kv_heads=cells.count("kv_heads"),
        ffn=cells.count("ffn"),
        vocabulary=cells.count("vocab"),
        sequence_length=cells.count("seq_len"),
        experts=cells.count("n_experts"),
        top_k=cells.count("top_k"),
        device=cells.text("gpu"),
        devices_per_node=cells.count("gpus_per_node"),
        inside_gigabytes=cells.number("intra_bw_GBps"),
        between_gigabits=cells.number("inter_bw_Gbps"),
        devices=cells.count("n_gpus"),
        data=cells.count("dp"),
        tensor=cells.count("tp"),
        sequence_parallel=None if sequence_parallel is None else bool(sequence_parallel),
        pipeline=cells.count("pp"),
        chunks=cells.count("vpp"),
        context=cells.count("cp"),
        expert=cells.count("ep"),
        zero=cells.count("zero_stage"),
        microbatch=cells.count("micro_batch"),
        global_batch=cells.count("global_batch"),
        recompute=cells.text("recompute") or None,
        precision=cells.text("dtype") or None,
        schedule=cells.text("schedule") or None,
        attention=cells.text("attention") or None,
    )


def _measured(cells: _Cells) -> Measured:
    note = cells.text("note")
    return Measured(
        step_seconds=cells.number("step_time_s") or None,
        tokens_per_second=cells.number("tokens_per_s_per_gpu") or None,
        model_teraflops=cells.number("model_tflops_per_gpu") or None,
        hardware_teraflops=cells.number("hw_tflops_per_gpu") or None,
        utilization=cells.number("mfu") or None,
        peak_gibibytes=cells.number("peak_mem_gib") or None,
        out_of_memory="RESULT = OOM" in note,
        note=note,
    )
