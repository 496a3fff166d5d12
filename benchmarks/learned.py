"""How far predictions for this machine are off, before and after they are corrected by what recorded runs took.

Ten models of five families, two sizes of each, run under up to ten plans each, on two cores, every run recorded by
`weft train` as any other.  From some of the runs the corrections are fitted, and others are predicted by them: the
other half of the runs; the other size of every family under plans that were not seen; and a family that was not seen.
The draws are seeded.  Runs that other work has disturbed are left out, as `weft train` leaves them out.

python -m benchmarks.learned                  all of them, about a quarter of an hour on 2 cores
python -m benchmarks.learned --runs FOLDER    go on in a folder, or read the runs that it holds
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import spread
from weft.api import train
from weft.config.cluster import Cluster, known_machine
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, PipelineParallelPlan, Plan
from weft.config.recipe import Recipe, parse_recipe
from weft.errors import PlanError
from weft.model.description import facts_of, profile_of
from weft.planning.learned import RecordedRun, corrected_step, corrections_of
from weft.planning.price import CostModel
from weft.run.launch.launcher import open_fork_server
from weft.techniques.check import check_plan
from weft.techniques.cost_terms import Layout
from weft.watch.learning import run_to_learn
from weft.watch.run_record import RunRecord

_TEXT = "sequence_length = 128\nvocabulary_size = 2048"
_EXPERTS = f"num_experts = 4\ntop_k = 2\n{_TEXT}"
MODELS: Mapping[str, tuple[str, str, int]] = {
    "decoder-a": ("decoder", f"num_layers = 2\nhidden_size = 128\nnum_heads = 4\n{_TEXT}", 16),
    "decoder-b": ("decoder", f"num_layers = 4\nhidden_size = 256\nnum_heads = 8\n{_TEXT}", 8),
    "encoder-a": ("encoder", f"num_layers = 2\nhidden_size = 128\nnum_heads = 4\n{_TEXT}", 16),
    "encoder-b": ("encoder", f"num_layers = 6\nhidden_size = 192\nnum_heads = 6\n{_TEXT}", 8),
    "mixture-a": ("decoder", f"num_layers = 2\nhidden_size = 128\nnum_heads = 4\n{_EXPERTS}", 8),
    "mixture-b": ("decoder", f"num_layers = 4\nhidden_size = 192\nnum_heads = 6\n{_EXPERTS}", 8),
    "mlp-a": ("mlp", "num_layers = 4\ninput_size = 256\nhidden_size = 512\nnum_classes = 10", 128),
    "mlp-b": ("mlp", "num_layers = 6\ninput_size = 256\nhidden_size = 1024\nnum_classes = 10", 256),
    "convnet-a": ("convnet", "num_layers = 2\nchannels = 32\nimage_size = 16", 32),
    "convnet-b": ("convnet", "num_layers = 4\nchannels = 64\nimage_size = 16", 32),
}
"""Reference, sizes, global batch."""
FAMILIES = tuple(dict.fromkeys(name.partition("-")[0] for name in MODELS))
_SECONDS, _LEAST_STEPS, _MOST_STEPS = 2.5, 40, 200
_DRAWS = 30

Runs = dict[tuple[str, str], RecordedRun]
"""(model, plan) → what was recorded."""


def recipe_of(model: str, steps: int) -> Recipe:
    reference, sizes, batch = MODELS[model]
    data = '[data]\ntrain = [{ source = "synthetic" }]\n' if reference in ("mlp", "convnet") else ""
    return parse_recipe(
        f'[model]\nreference = "{reference}"\n{sizes}\n[batch]\nglobal_batch_size = {batch}\n[run]\nsteps = {steps}\n'
        f'{data}[permit]\nprecision = ["fp32"]\n'
    )


def plans_of(batch: int) -> dict[str, Plan]:
    """Plans on two cores."""

    def plan(zero: int, parts: int = 1, threads: int = 1, **mesh: int) -> Plan:
        size = batch // parts // (mesh.get("replicate", 1) * mesh.get("shard", 1))
        return Plan(
            mesh=MeshPlan(**mesh),
            data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
            pipeline_parallel=PipelineParallelPlan(schedule="1f1b"),
            microbatch=MicrobatchPlan(size=size, per_step=parts),
            compute=ComputePlan(precision="fp32", threads_per_rank=threads),
        )

    return {
        "one": plan(1, threads=2), "one-mb4": plan(1, 4, threads=2), "dp2-z0": plan(0, replicate=2),
        "dp2-z1": plan(1, replicate=2), "dp2-z2-mb2": plan(2, 2, replicate=2), "dp2-z3": plan(3, shard=2),
        "dp2-z3-mb2": plan(3, 2, shard=2), "tp2": plan(1, tensor=2), "tp2-mb2": plan(1, 2, tensor=2),
        "pp2": plan(1, 4, pipeline=2),
    }  # fmt: skip


def cases() -> Iterator[tuple[str, str, Plan]]:
    """All models and plans that fit together, in an order that mixes them."""
    every = [(model, name, plan) for model in MODELS for name, plan in plans_of(MODELS[model][2]).items()]
    random.Random(1).shuffle(every)
    for model, name, plan in every:
        recipe = recipe_of(model, 1)
        try:
            check_plan(plan, recipe, facts_of(recipe), None)
        except PlanError:  # batch norms see no microbatches
            continue
        yield model, name, plan


def run_all(folder: Path, cluster: Cluster) -> None:
    """Train every case that the folder does not hold yet."""
    with open_fork_server(None) as fork_server:
        for model, name, plan in cases():
            run = folder / f"{model}__{name}"
            if run.exists():
                continue
            priced = CostModel(profile_of(recipe_of(model, 1)), cluster).predict(Layout.of(plan)).step_seconds
            steps = int(min(_MOST_STEPS, max(_LEAST_STEPS, _SECONDS / priced)))
            log(f"{model}, {name}: {steps} steps")
            recipe = recipe_of(model, steps)
            train(recipe, plan, folder=run, quiet=True, prove="never", trials=False, fork_server=fork_server)


def recorded(folder: Path, cluster: Cluster) -> tuple[Runs, dict[str, str]]:
    """What was recorded of every case, and why of some nothing is used."""
    runs, refused = Runs(), dict[str, str]()
    for model, name, _ in cases():
        if not (folder / f"{model}__{name}").is_dir():
            continue
        with closing(RunRecord(folder / f"{model}__{name}")) as record:
            run = run_to_learn(record, profile_of(recipe_of(model, 1)), cluster)
        if isinstance(run, str):
            refused[f"{model}, {name}"] = run
        else:
            runs[model, name] = run
    return runs, refused


def errors(runs: Runs, seen: Sequence[tuple[str, str]], asked: Sequence[tuple[str, str]]) -> list[float]:
    """Errors of the predictions of some runs, corrected by others."""
    corrections = corrections_of([runs[key] for key in seen])
    return [abs(corrected_step(runs[key], corrections) / runs[key].measured.step - 1) for key in asked]


def held_out(runs: Runs) -> dict[str, list[float]]:
    """Errors by what had no part in the fit."""
    keys, plans = list(runs), sorted({plan for _, plan in runs})
    found: dict[str, list[float]] = {
        "before": [abs(run.priced.step / run.measured.step - 1) for run in runs.values()],
        "the other half of the runs": [],
        "the other size of each family, plans that were not seen": [],
        "a family that was not seen": [],
    }
    before, half, size, family = found
    for seed in range(_DRAWS):
        draw = random.Random(seed)
        mixed = draw.sample(keys, len(keys))
        found[half] += errors(runs, mixed[: len(keys) // 2], mixed[len(keys) // 2 :])
        sizes = {f"{name}-{draw.choice('ab')}" for name in FAMILIES}
        known = set(draw.sample(plans, len(plans) // 2))
        seen = [key for key in keys if key[0] in sizes and key[1] in known]
        found[size] += errors(runs, seen, [key for key in keys if key[0] not in sizes and key[1] not in known])
    for name in FAMILIES:
        mine = [key for key in keys if key[0].startswith(name)]
        of_family = errors(runs, [key for key in keys if key not in mine], mine)
        found[family] += of_family
        found[f"{family}: {name}"] = of_family
    return found


def goals(found: Mapping[str, Sequence[float]], machine_words: str) -> list[Goal]:
    made: list[Goal] = []
    for what, values in found.items():
        if ": " in what or not values:
            continue
        low, high = spread(values)
        words = f"error of the predicted step, median, {machine_words}"
        words += ", uncorrected" if what == "before" else f", corrected; predicted: {what}"
        made.append(Goal(what=words, measured=100 * median(values), goal=10, better="lower",
                         spread=(100 * low, 100 * high), unit=" %"))  # fmt: skip
    return made


def main() -> None:
    parser = options_parser(__doc__, rounds=1)
    parser.add_argument("--runs", type=Path, help="folder of the runs; by default a new one that goes again")
    options = parser.parse_args()
    known, here = known_machine(), machine()
    with tempfile.TemporaryDirectory(prefix="weft-learned-") as made:
        folder = options.runs or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        run_all(folder, known.cluster)
        every, samples = list[Goal](), dict[str, Any]()
        of_machine = {"not probed": Cluster.detect()} | ({} if known.note else {"probed": known.cluster})
        for words, cluster in of_machine.items():
            runs, refused = recorded(folder, cluster)
            found = held_out(runs)
            every += goals(found, f"machine {words}")
            samples[words] = {
                "runs": {f"{model}, {plan}": asdict(run) for (model, plan), run in runs.items()},
                "refused": refused,
                "corrections": asdict(corrections_of(list(runs.values()))),
                "median_errors": {what: median(values) for what, values in found.items() if values},
            }
    about = {"settings": {"draws": _DRAWS}, "machine": here, "versions": versions(), "note": options.note}
    write_result("learned", goals=every, samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
