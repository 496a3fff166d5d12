"""Compressed gradients: what they cost in loss, and what they gain on a slow link beside what `advise` says.

Part 1 trains a character model of Python's own source with Weft's engine on two ranks, three seeds for every codec,
once with SGD and once with AdamW; runs of one seed are pairs.  Part 2 puts two ranks into network namespaces with a
link of 100 Mbit/s, runs all codecs in turn, and compares the speed-up with the one predicted from bytes, codec times
and the rate.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import typing
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._contender import Entry, Host, contenders, interleave
from benchmarks._llama import shape_of
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._slow_link import NoNamespacesError, slow_link
from benchmarks._statistics import round_ratios, spread, summary
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan, dump_plan
from weft.config.recipe import BatchRecipe, DecoderShape, ModelRecipe, OptimizerRecipe, PermitRecipe, Recipe, RunRecipe
from weft.model.reference.decoder import build_decoder
from weft.run.data import rank_range
from weft.run.engine import create_training
from weft.run.launch import RankInfo, initialise_distributed
from weft.run.launch.launcher import launch_function
from weft.techniques.compression.codecs import CodecSpec, Exchange, Link, compressed, uncompressed

CODECS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "bf16": {"compression": "bf16"},
    "int8": {"compression": "int8"},
    "powersgd rank 2": {"compression": "powersgd", "powersgd_rank": 2},
    "powersgd rank 4": {"compression": "powersgd", "powersgd_rank": 4},
    "powersgd rank 8": {"compression": "powersgd", "powersgd_rank": 8},
    "topk 1 %": {"compression": "topk", "topk_share": 0.01},
    "randomk 10 %": {"compression": "randomk", "randomk_share": 0.1},
    "signsgd": {"compression": "signsgd"},
}
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"name": "sgd", "learning_rate": 0.3, "momentum": 0.9},
    "adamw": {"name": "adamw", "learning_rate": 2e-3},
}
LIMITS: Mapping[str, float] = {"bf16": 1.0, "int8": 1.0, "powersgd rank 4": 3.0}
"""Per cent by which the loss may end higher."""
SEEDS = (1, 2, 3)
_BATCH, _CONTEXT, _VOCABULARY = 16, 64, 96
_RATE, _RATE_BYTES = "100mbit", 12.5e6
_SLOW: Mapping[str, Any] = {
    "num_layers": 4, "hidden_size": 256, "ffn_size": 1024, "vocabulary_size": 2048, "sequence_length": 64, "batch": 4,
}  # fmt: skip
_SLOW_CODECS = ("none", "bf16", "int8", "powersgd rank 4", "topk 1 %")


# ── what it costs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def characters() -> Tensor:
    """(characters,) of three modules of the standard library; printable ASCII, and one for all else."""
    source = "".join(inspect.getsource(module) for module in (argparse, ast, typing))
    return torch.tensor([min(max(ord(letter) - 31, 0), _VOCABULARY - 1) for letter in source])


def study_rank(rank_info: RankInfo, codec: str, optimizer: str, seeds: Sequence[int], steps: int) -> list[float]:
    """Train once per seed on this rank; final losses over the last tenth of the text."""
    with initialise_distributed("cpu"):
        torch.set_num_threads(1)
        return [_final_loss(codec, optimizer, seed, steps, rank_info.world_size) for seed in seeds]


def _final_loss(codec: str, optimizer: str, seed: int, steps: int, world: int) -> float:
    plan = _plan(codec, world, _BATCH // world)
    shape = DecoderShape(
        num_layers=3, hidden_size=128, num_heads=4, ffn_size=384, vocabulary_size=_VOCABULARY, sequence_length=_CONTEXT
    )
    recipe = Recipe(
        model=ModelRecipe(reference="decoder", shape=shape),
        batch=BatchRecipe(global_batch_size=_BATCH),
        optimizer=OptimizerRecipe(**OPTIMIZERS[optimizer], max_grad_norm=1.0, warmup_steps=min(20, steps)),
        run=RunRecipe(steps=steps, seed=seed),
        permit=PermitRecipe(compression=("bf16", "int8", "powersgd", "topk", "randomk", "signsgd")),
    )
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    training = create_training(recipe, plan, build_decoder(shape), mesh, Recorder())
    text = characters()
    cut = len(text) * 9 // 10
    mine = slice(*rank_range(plan.microbatch, world, mesh.index("data")))
    rate = OPTIMIZERS[optimizer]["learning_rate"]
    for step in range(steps):
        order = torch.Generator().manual_seed(1_000_003 * seed + step)
        places = torch.randint(cut - _CONTEXT - 1, (_BATCH,), generator=order)[mine]
        factor = min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        training.stepper([_batch(text, places)], step=step, learning_rate=rate * factor)
    places = torch.linspace(cut, len(text) - _CONTEXT - 2, 64 * world).long()[mesh.index("data") :: world]
    found = training.model.runner.evaluate([_batch(text, places)], step=0, seed=seed)
    totals = torch.stack([found.sum, found.count])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def _batch(text: Tensor, places: Tensor) -> dict[str, Tensor]:
    window = text[places[:, None] + torch.arange(_CONTEXT + 1)]
    return {"tokens": window[:, :-1], "labels": window[:, 1:], "sample_ids": places}


def _plan(codec: str, world: int, size: int) -> Plan:
    return Plan(
        mesh=MeshPlan(replicate=world),
        data_parallel=DataParallelPlan(zero=0, bucket_bytes=4_000_000, **CODECS[codec]),
        microbatch=MicrobatchPlan(size=size, per_step=1),
        compute=ComputePlan(device="cpu", backend="gloo"),
    )


def study(steps: int) -> dict[str, dict[str, list[float]]]:
    """Final losses by optimizer and codec, one for each seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for optimizer in OPTIMIZERS:
        found[optimizer] = {}
        for codec in CODECS:
            arguments = {"codec": codec, "optimizer": optimizer, "seeds": list(SEEDS), "steps": steps}
            losses = launch_function("benchmarks.compression:study_rank", arguments, 2, threads_per_rank=1)
            assert losses[0] == losses[1], "ranks drifted apart"
            found[optimizer][codec] = losses[0]
            log(f"{optimizer} {codec}: {mean(losses[0]):.4f}")
    return found


def study_goals(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Goal]:
    goals: list[Goal] = []
    for optimizer, losses in found.items():
        for codec, limit in LIMITS.items():
            gaps = [100 * (mine / plain - 1) for mine, plain in zip(losses[codec], losses["none"], strict=True)]
            what = f"final loss above no compression, {optimizer}, {codec}, mean of {len(gaps)} pairs"
            goals.append(
                Goal(what=what, measured=mean(gaps), goal=limit, better="lower", unit=" %", spread=spread(gaps))
            )
    return goals


# ── what it gains ─────────────────────────────────────────────────────────────────────────────────────────────────────


def slow_steps(hosts: tuple[Host, Host], rounds: int) -> dict[str, list[float]]:
    """Seconds of steps on the slow link by codec; `alone` is a rank's own share without anybody to talk to."""
    entries = [
        Entry(
            name=codec,
            target="benchmarks._weft:weft",
            settings={**_SLOW, "plan": dump_plan(_plan(codec, 2, _SLOW["batch"]), everything=True)},
            hosts=hosts,
        )
        for codec in _SLOW_CODECS
    ]
    settings = {**_SLOW, "plan": dump_plan(_plan("none", 1, _SLOW["batch"]), everything=True)}
    entries.append(Entry(name="alone", target="benchmarks._weft:weft", settings=settings, ranks=1))
    with contenders(entries, warmup_steps=3) as alive:
        blocks = interleave(alive, rounds=rounds, steps=2)
    return {name: [s for block in found for s in block.seconds] for name, found in blocks.items()}


def predicted(compute_seconds: float) -> dict[str, float]:
    """Seconds of a step by codec, as `weft comm advise` predicts them."""
    module = build_decoder(shape_of(_SLOW)).module
    exchange = Exchange(shapes=tuple(p.shape for p in module.parameters()), members=2, frame_bytes=4_000_000)
    link = Link(latency_seconds=50e-6, bandwidth_bytes_per_second=_RATE_BYTES)
    found: dict[str, float] = {}
    torch.set_num_threads(1)
    for codec in _SLOW_CODECS:
        if codec == "none":
            estimate = uncompressed(exchange, link, compute_seconds)
        else:
            settings = dict(CODECS[codec])
            compression = CodecSpec(codec=settings.pop("compression"), **settings)
            estimate = compressed(compression, exchange, link, compute_seconds, torch.device("cpu"))
        assert estimate.step_seconds is not None
        found[codec] = estimate.step_seconds
    return found


def gain(samples: dict[str, Any], rounds: int) -> list[Goal]:
    """Run the second part, and keep its samples."""
    with slow_link(_RATE) as hosts:
        steps = slow_steps(hosts, rounds)
    foretold = predicted(median(steps["alone"]))
    samples["slow link"] = {
        "seconds": steps,
        "predicted_seconds": foretold,
        "summary": {name: summary(found) for name, found in steps.items()},
    }
    return gain_goals(steps, foretold)


def gain_goals(steps: Mapping[str, Sequence[float]], foretold: Mapping[str, float]) -> list[Goal]:
    goals: list[Goal] = []
    for codec in _SLOW_CODECS[1:]:
        ratios = round_ratios(steps["none"], steps[codec])
        gain, said = median(ratios), foretold["none"] / foretold[codec]
        if codec in ("int8", "powersgd rank 4"):
            what = f"step at 100 Mbit/s, {codec}, times faster"
            goals.append(Goal(what=what, measured=gain, goal=2.0, better="higher", unit="x", spread=spread(ratios)))
        what = f"gain of {codec} at 100 Mbit/s ({gain:.2f}x) off the prediction ({said:.2f}x)"
        goals.append(Goal(what=what, measured=100 * abs(said / gain - 1), goal=20.0, better="lower", unit=" %"))
    return goals


def main() -> None:
    parser = options_parser(__doc__, rounds=6)
    parser.add_argument("--steps", type=int, default=400, help="of each training of the first part")
    parser.add_argument("--parts", nargs="+", choices=("loss", "gain"), default=["loss", "gain"], help="which to run")
    options = parser.parse_args()
    before = machine()
    samples: dict[str, Any] = {}
    goals: list[Goal] = []
    if "gain" in options.parts:
        try:
            goals += gain(samples, options.rounds)
        except NoNamespacesError as problem:
            log(f"left out: the slow link ({problem})")
    if "loss" in options.parts:
        samples["final losses"] = losses = study(options.steps)
        goals += study_goals(losses)
    about = {
        "machine": before,
        "versions": versions(),
        "settings": {"steps": options.steps, "slow": dict(_SLOW), "codecs": {k: dict(v) for k, v in CODECS.items()}},
        "note": options.note,
    }
    write_result("compression", goals=goals, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
