"""A few published runs as a CSV file, with cells replaced."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks.published import PUBLISHED_RUNS, Validation, validate


def shipped(every: int = 1, families: Iterable[str] | None = None) -> list[dict[str, str]]:
    """Rows of the shipped file as they stand there."""
    with PUBLISHED_RUNS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = None if families is None else set(families)
    return [row for row in rows if wanted is None or row["source_family"] in wanted][::every]


@cache
def validated() -> Validation:
    """All shipped rows, predicted from data sheets."""
    return validate(PUBLISHED_RUNS, "datasheet")


def write(path: Path, rows: Sequence[Mapping[str, str]], columns: Sequence[str] | None = None) -> Path:
    names = list(columns if columns is not None else rows[0])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


LLAMA = {
    "source_family": "someone",
    "source": "a page of 2024",
    "model": "llama3-8b",
    "params_b": "8.03",
    "n_layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "seq_len": "8192",
    "n_experts": "",
    "top_k": "",
    "gpu": "H100-80GB-SXM",
    "gpus_per_node": "8",
    "intra_bw_GBps": "450",
    "inter_bw_Gbps": "3200",
    "n_gpus": "16",
    "dp": "4",
    "tp": "2",
    "sp": "1",
    "pp": "2",
    "vpp": "1",
    "cp": "1",
    "ep": "1",
    "zero_stage": "1",
    "micro_batch": "1",
    "global_batch": "64",
    "recompute": "none",
    "dtype": "bf16",
    "step_time_s": "",
    "tokens_per_s_per_gpu": "",
    "model_tflops_per_gpu": "",
    "hw_tflops_per_gpu": "",
    "mfu": "",
    "peak_mem_gib": "",
    "note": "",
    "use": "calibrate",
}
"""A run whose source says everything."""
