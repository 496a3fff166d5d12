"""A model whose state is several times the memory that its ranks may use, trained to the same losses.

Three runs of the same recipe on two ranks: with ZeRO-3 and no limit; the same under a limit, which must not fit; and
under that limit with parameters, gradients and optimizer states on a disk.  The limit is the kernel's on private memory
of a process (`RLIMIT_DATA`), which ranks inherit; pages of files are not counted in it, so the peak of what a rank has
resident, pages of files included, stands beside it and has to be below it as well.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from weft.plan import ComputePlan, DataParallelPlan, MemoryPlan, MeshPlan, MicrobatchPlan, Plan
from weft.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    DecoderShape,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    RunRecipe,
)

RANKS, STEPS = 2, 3
_STATE_BYTES = 16
"""Bytes per parameter in fp32 with AdamW: weight, gradient, two moments."""


def shape(layers: int) -> DecoderShape:
    return DecoderShape(
        num_layers=layers, hidden_size=512, num_heads=8, num_kv_heads=8, ffn_size=2048, vocabulary_size=512,
        sequence_length=32, tie_embeddings=True, dropout=0.0,
    )  # fmt: skip


def recipe(layers: int) -> Recipe:
    return Recipe(
        model=ModelRecipe(reference="decoder", shape=shape(layers)),
        data=DataRecipe(train=(DataSource(source="synthetic"),)),
        batch=BatchRecipe(global_batch_size=RANKS),
        optimizer=OptimizerRecipe(learning_rate=1e-3, warmup_steps=1),
        run=RunRecipe(steps=STEPS, seed=5),
    )


def plan(folder: Path | None) -> Plan:
    away = MemoryPlan(offload="parameters", offload_to="disk", offload_folder=str(folder))
    return Plan(
        mesh=MeshPlan(shard=RANKS),
        data_parallel=DataParallelPlan(zero=3),
        microbatch=MicrobatchPlan(size=1, per_step=1),
        memory=MemoryPlan() if folder is None else away,
        compute=ComputePlan(device="cpu"),
    )


def parameters(layers: int) -> int:
    """Parameters of the model, which is not built."""
    import torch

    from weft.models.decoder import build_decoder

    with torch.device("meta"):
        return sum(each.numel() for each in build_decoder(shape(layers)).module.parameters())


def run(layers: int, *, limit_bytes: int | None, folder: Path | None) -> dict[str, Any]:
    """Losses and the largest peak of resident memory of a run in a process of its own, or why it failed."""
    with tempfile.TemporaryDirectory(dir=_build()) as place:
        command = [sys.executable, "-m", "benchmarks.beyond_memory", "--inside", place, "--layers", str(layers)]
        command += ["--limit", str(limit_bytes or 0)]
        command += ["--disk", str(folder)] if folder is not None else []
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return {"error": done.stderr.strip()[-2000:]} if done.returncode else json.loads(done.stdout.splitlines()[-1])


def _build() -> Path:
    (ROOT / "build").mkdir(exist_ok=True)
    return ROOT / "build"


def inside(options: argparse.Namespace) -> None:
    """Take the limit, train, and print what was seen."""
    import weft

    if options.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (options.limit, options.limit))
    began = time.perf_counter()
    done = weft.train(recipe(options.layers), plan(options.disk), folder=options.inside / "run", quiet=True)
    seconds = (time.perf_counter() - began) / STEPS
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    lines = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["memory_bytes"] for line in lines if line.get("memory_bytes")]
    print(json.dumps({"losses": done.losses, "peak_bytes": peak, "step_peaks": steps, "seconds_per_step": seconds}))


def main() -> None:
    parser = options_parser(__doc__, rounds=None)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--limit", type=int, default=720_000_000, help="bytes of private memory per rank")
    parser.add_argument("--on", type=Path, default=_build(), help="a folder on the disk")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--disk", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        inside(options)
        return
    before, state = machine(), _STATE_BYTES * parameters(options.layers)
    log(f"state {state / 1e9:.2f} GB, {RANKS} ranks of {options.limit / 1e9:.2f} GB")
    free = run(options.layers, limit_bytes=None, folder=None)
    refused = run(options.layers, limit_bytes=options.limit, folder=None)
    away = run(options.layers, limit_bytes=options.limit, folder=options.on)
    for name, each in (("free", free), ("limited", refused), ("on disk", away)):
        log(f"{name}: {each}")
    goals = [
        Goal(what="state over the memory that the ranks may use", measured=state / (RANKS * options.limit), goal=3.0,
             better="higher", unit="x"),
        Goal(what="largest resident memory of a rank over its limit, pages of files included",
             measured=away.get("peak_bytes", 0) / options.limit, goal=1.0, better="lower", unit="x"),
        Goal(what="same losses as without limit", measured=float(free.get("losses") == away.get("losses", 0)), goal=1.0,
             better="higher"),
        Goal(what="the same limit without a disk is too little", measured=float("error" in refused), goal=1.0,
             better="higher"),
    ]  # fmt: skip
    settings = {"state_bytes": state, "limit_bytes": options.limit, "ranks": RANKS, "layers": options.layers}
    about = {"machine": before, "versions": versions(), "settings": settings, "note": options.note}
    samples = {"without limit": free, "limited": refused, "on disk": away}
    write_result("beyond-memory", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
