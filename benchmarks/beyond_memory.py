"""Models whose state is several times the memory that their ranks may use, trained to the same losses.

Two of them: one of which no rank could hold its share, with parameters, gradients, optimizer states and activations on
a disk under ZeRO-3; and one in one process, with optimizer states and activations there.  Each recipe is trained three
times: without a limit and with everything in memory; the same under a limit, which must not fit; and under that limit
with a disk.  The limit is the kernel's on private memory of a process (`RLIMIT_DATA`).  The launcher has it, too, which
exports at the end, and ranks inherit it.  Pages of files are not counted in it, nor is memory that processes share, so
the peak of what a rank has resident, both included, stands beside it and has to be below it as well.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from weft.config.plan import ComputePlan, DataParallelPlan, MemoryPlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    DecoderShape,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    RunRecipe,
)

STEPS = 3
_STATE_BYTES = 16
"""Bytes per parameter in fp32 with AdamW: weight, gradient, two moments."""


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and the limit of each process."""

    what: str
    layers: int
    hidden: int
    tokens: int
    """Of a sample."""
    samples: int
    """Of a step."""
    ranks: int
    limit_bytes: int
    steps: int = STEPS

    @property
    def shards(self) -> bool:
        """Whether ZeRO-3 shares weights out."""
        return self.ranks > 1

    def shape(self) -> DecoderShape:
        return DecoderShape(
            num_layers=self.layers, hidden_size=self.hidden, num_heads=8, num_kv_heads=8, ffn_size=4 * self.hidden,
            vocabulary_size=512, sequence_length=self.tokens, tie_embeddings=True, dropout=0.0,
        )  # fmt: skip

    def recipe(self) -> Recipe:
        return Recipe(
            model=ModelRecipe(reference="decoder", shape=self.shape()),
            data=DataRecipe(train=(DataSource(source="synthetic"),)),
            batch=BatchRecipe(global_batch_size=self.samples),
            optimizer=OptimizerRecipe(learning_rate=1e-3, warmup_steps=1),
            run=RunRecipe(steps=self.steps, seed=5),
        )

    def plan(self, folder: Path | None) -> Plan:
        away = MemoryPlan(offload=self.what, offload_to="disk", offload_folder=str(folder))  # type: ignore[arg-type]
        return Plan(
            mesh=MeshPlan(shard=self.ranks) if self.shards else MeshPlan(),
            data_parallel=DataParallelPlan(zero=3 if self.shards else 0, bucket_bytes=8 << 20),
            microbatch=MicrobatchPlan(size=self.samples // self.ranks, per_step=1),
            memory=MemoryPlan() if folder is None else away,
            compute=ComputePlan(device="cpu"),
        )

    def parameters(self) -> int:
        """Parameters of the model, which is not built."""
        import torch

        from weft.model.reference.decoder import build_decoder

        with torch.device("meta"):
            return sum(each.numel() for each in build_decoder(self.shape()).module.parameters())

    def state_bytes(self) -> int:
        """Weights, gradients and optimizer states of all ranks."""
        return _STATE_BYTES * self.parameters()

    def to_text(self) -> str:
        return json.dumps(vars(self))


CASES = {
    "parameters": Case("parameters+activations", 64, 512, 32, 2, 2, 680_000_000),
    "activations": Case("optimizer+activations", 120, 96, 512, 4, 1, 700_000_000),
}


def run(case: Case, *, limit: bool, folder: Path | None) -> dict[str, Any]:
    """What a run in a process of its own saw, or why it failed."""
    with tempfile.TemporaryDirectory(dir=_build()) as place:
        command = [sys.executable, "-m", "benchmarks.beyond_memory", "--inside", place, "--case", case.to_text()]
        command += ["--limited"] if limit else []
        command += ["--disk", str(folder)] if folder is not None else []
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return {"error": done.stderr.strip()[-2000:]} if done.returncode else json.loads(done.stdout.splitlines()[-1])


def _build() -> Path:
    (ROOT / "build").mkdir(exist_ok=True)
    return ROOT / "build"


def inside(case: Case, options: argparse.Namespace) -> None:
    """Take the limit, train, and print what was seen."""
    import weft

    if options.limited:
        resource.setrlimit(resource.RLIMIT_DATA, (case.limit_bytes, case.limit_bytes))
    began = time.perf_counter()
    done = weft.train(case.recipe(), case.plan(options.disk), folder=options.inside / "run", quiet=True)
    seconds = (time.perf_counter() - began) / case.steps
    peaks = {
        "rank_peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "launcher_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    assert done.export is not None
    exported = sum(file.stat().st_size for file in done.export.glob("*.safetensors"))
    print(json.dumps({"losses": done.losses, **peaks, "export_bytes": exported, "seconds_per_step": seconds}))


def goals_of(name: str, case: Case, free: dict[str, Any], refused: dict[str, Any], away: dict[str, Any]) -> list[Goal]:
    share = case.state_bytes() / (case.ranks * case.limit_bytes)
    whole = Goal(what=f"{name}: weights, gradients and optimizer states over the memory that the ranks may use",
                 measured=share, goal=3.0, better="higher", unit="x")  # fmt: skip
    return [
        *([whole] if case.shards else []),
        Goal(what=f"{name}: what a rank without limit has resident over the limit",
             measured=free.get("rank_peak_bytes", 0) / case.limit_bytes, goal=3.0, better="higher", unit="x"),
        Goal(what=f"{name}: largest resident memory of a rank over its limit, pages of files included",
             measured=away.get("rank_peak_bytes", 0) / case.limit_bytes, goal=1.0, better="lower", unit="x"),
        Goal(what=f"{name}: largest resident memory of the launcher, which exports, over the limit",
             measured=away.get("launcher_peak_bytes", 0) / case.limit_bytes, goal=1.0, better="lower", unit="x"),
        Goal(what=f"{name}: same losses as without limit",
             measured=float(free.get("losses") == away.get("losses", 0)), goal=1.0, better="higher"),
        Goal(what=f"{name}: the same limit without a disk is too little", measured=float("error" in refused), goal=1.0,
             better="higher"),
    ]  # fmt: skip


def main() -> None:
    parser = options_parser(__doc__, rounds=None)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--on", type=Path, default=_build(), help="a folder on the disk")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limited", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--disk", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        inside(Case(**options.case), options)
        return
    before, goals, samples = machine(), list[Goal](), dict[str, Any]()
    for name, case in CASES.items():
        if options.only not in (None, name):
            continue
        log(f"{name}: state {case.state_bytes() / 1e9:.2f} GB, {case.ranks} × {case.limit_bytes / 1e9:.2f} GB")
        found = {
            "without limit": run(case, limit=False, folder=None),
            "limited": run(case, limit=True, folder=None),
            "on disk": run(case, limit=True, folder=options.on),
        }
        for kind, each in found.items():
            log(f"  {kind}: {each}")
        goals += goals_of(name, case, *found.values())
        samples[name] = {"case": vars(case), "state_bytes": case.state_bytes(), **found}
    about = {"machine": before, "versions": versions(), "settings": {"steps": STEPS}, "note": options.note}
    write_result("beyond_memory", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
