"""Loads under another plan than saved: 0.9 GB of state on two ranks, by Weft and by torch's distributed checkpoints.

Files lie in the page cache, as they do after a save.  Weft verifies the digest of every byte before it uses one; the
peer verifies none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks._options import options_parser
from benchmarks._results import ROOT, Goal, log, machine, versions, write_result
from benchmarks._statistics import spread
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import parse_plan
from weft.config.recipe import parse_recipe
from weft.model.build import build_model
from weft.run.checkpoint import Checkpointer, Peers
from weft.run.engine import create_training
from weft.run.launch import RankInfo, initialise_distributed
from weft.run.launch.launcher import launch_function

_RECIPE = """
[model]
reference = "mlp"
num_layers = 2
input_size = 2048
hidden_size = 2048
num_classes = 8
[data]
train = [{ source = "synthetic" }]
[batch]
global_batch_size = 16
[run]
steps = 1
"""
_MICROBATCH = "[microbatch]\nsize = 8\n"
PLANS = {
    "data": f"[mesh]\nreplicate = 2\n{_MICROBATCH}",
    "shard": f"[mesh]\nshard = 2\n[data_parallel]\nzero = 3\n{_MICROBATCH}",
    "tensor": f"[mesh]\ntensor = 2\n{_MICROBATCH}",
}
CASES = (("shard", "data"), ("data", "shard"), ("shard", "tensor"))
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def weft_seconds(folder: Path, saved: str, loaded: str) -> float:
    for plan, loads in ((saved, False), (loaded, True)):
        arguments = {"plan": PLANS[plan], "folder": str(folder), "loads": loads}
        seconds = launch_function("benchmarks.reloading:run_rank", arguments, 2, threads_per_rank=1)
    return max(seconds)


def run_rank(rank_info: RankInfo, *, plan: str, folder: str, loads: bool) -> float:
    """Save what a model begins with, or load what was saved; return the seconds that it took."""
    torch.set_num_threads(1)
    recipe, how = parse_recipe(_RECIPE), parse_plan(plan)
    with initialise_distributed("cpu", rank_info) as distributed:
        mesh = Mesh(how.mesh, distributed.device)
        training = create_training(recipe, how, build_model(recipe), mesh, Recorder())
        shards = training.checkpoint_shards()
        checkpointer = Checkpointer(Path(folder), Peers.of_group(mesh["world"]))
        dist.barrier()
        began = time.perf_counter()
        if loads:
            checkpointer.load("latest", shards)
        else:
            checkpointer.save(1, shards, {})
        dist.barrier()
        return time.perf_counter() - began


def peer_seconds(folder: Path, saved: str, loaded: str) -> float:
    for layout, deed in ((saved, "save"), (loaded, "load")):
        command = [*_TORCHRUN, "-m", "benchmarks._reloading_peer", str(folder), layout, deed]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment)
    return float((folder / "seconds").read_text())


def main() -> None:
    parser = options_parser(__doc__, rounds=3)
    options = parser.parse_args()
    before = machine()
    samples: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for saved, loaded in CASES:
            for name, seconds_of in (("weft", weft_seconds), ("dcp", peer_seconds)):
                with tempfile.TemporaryDirectory(dir=ROOT) as folder:
                    seconds = seconds_of(Path(folder), saved, loaded)
                samples.setdefault(f"{name}: {saved} → {loaded}", []).append(seconds)
                log(f"round {number + 1}: {name}, {saved} → {loaded}: {seconds:.2f} s")
    goals: list[Goal] = []
    for saved, loaded in CASES:
        pairs = zip(samples[f"weft: {saved} → {loaded}"], samples[f"dcp: {saved} → {loaded}"], strict=True)
        ratios = [own / peer for own, peer in pairs]
        goals.append(
            Goal(
                what=f"load of 0.9 GB relative to dcp.load, {saved} → {loaded}",
                measured=median(ratios),
                goal=1.0,
                better="lower",
                spread=spread(ratios),
            )
        )
    about = {"machine": before, "versions": versions(), "settings": {"plans": PLANS}, "note": options.note}
    write_result("reloading", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
