"""`plan = "auto"` against every plan that was run: is the chosen one the fastest, and are the predictions right?

A cell is a model, a batch and a number of processes.  In each, auto chooses twice: by prediction alone, as for a short
run, and with the trials that a run of a quarter of an hour pays for (compilation is left out: the other plans are not
compiled either).  Both choices and plans of every kind (axes × ZeRO stage × microbatch × precision × schedule) then run
a few steps each.  The fastest three and the choices run again, in turn, and only these second times count, so that luck
does not choose.  Worlds larger than the cores are reported apart.

python -m benchmarks.auto --cells 3       the first cells of the shuffled list
python -m benchmarks.auto                 all of them, about half an hour on 2 cores
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import median_interval, spread
from weft.api import TimedPlan, decide_by_trials, step_seconds, time_plans
from weft.config.cluster import Cluster, known_machine
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, PipelineParallelPlan, Plan
from weft.config.recipe import Recipe, parse_recipe
from weft.errors import PlanError
from weft.model.description import facts_of, profile_of
from weft.planning.search import Candidate, PlanChoice, choose_plan
from weft.techniques.check import check_plan

_DECODER = "sequence_length = 128\nvocabulary_size = 2048"
MODELS: Mapping[str, tuple[str, str]] = {
    "decoder-small": ("decoder", f"num_layers = 2\nhidden_size = 64\nnum_heads = 4\n{_DECODER}"),
    "decoder-medium": ("decoder", f"num_layers = 4\nhidden_size = 128\nnum_heads = 4\n{_DECODER}"),
    "decoder-large": ("decoder", f"num_layers = 4\nhidden_size = 256\nnum_heads = 8\n{_DECODER}"),
    "encoder-small": ("encoder", f"num_layers = 2\nhidden_size = 64\nnum_heads = 4\n{_DECODER}"),
    "encoder-large": ("encoder", f"num_layers = 4\nhidden_size = 256\nnum_heads = 8\n{_DECODER}"),
    "mlp-small": ("mlp", "num_layers = 2\ninput_size = 64\nhidden_size = 128\nnum_classes = 10"),
    "mlp-large": ("mlp", "num_layers = 6\ninput_size = 256\nhidden_size = 1024\nnum_classes = 10"),
    "convnet-small": ("convnet", "num_layers = 2\nchannels = 16"),
    "convnet-large": ("convnet", "num_layers = 4\nchannels = 64\nimage_size = 16"),
}
BATCHES = (8, 32)
WORLDS = (1, 2, 4)
MOST_PLANS = 12
_MOST_SLOW_PLANS = 2
_NEAR = 0.05
_TRIED_SECONDS = 900.0
"""Predicted length of the run whose trials choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    model: str
    batch: int
    world: int

    @property
    def name(self) -> str:
        return f"{self.model}, batch {self.batch}, {self.world} processes"

    @property
    def recipe(self) -> Recipe:
        reference, sizes = MODELS[self.model]
        return parse_recipe(
            f'[model]\nreference = "{reference}"\n{sizes}\n[batch]\nglobal_batch_size = {self.batch}\n'
            '[run]\nsteps = 100\n[permit]\nprecision = ["fp32", "bf16"]\n'
        )


def cells() -> list[Cell]:
    """All of them, in an order that mixes models, so that the first few are a fair sample."""
    every = [Cell(model=m, batch=b, world=w) for m in MODELS for b in BATCHES for w in WORLDS]
    every += [Cell(model=m, batch=128, world=2) for m in MODELS if m.startswith(("mlp", "decoder-small"))]
    random.Random(0).shuffle(every)
    return every


def chosen(cell: Cell, cluster: Cluster) -> tuple[PlanChoice, PlanChoice]:
    """What auto chooses by prediction, and with trials; nothing that earlier trials kept is used."""
    recipe = cell.recipe
    facts = facts_of(recipe)
    choice = choose_plan(recipe, cluster, facts, cell.world, profile=profile_of(recipe))
    steps = int(_TRIED_SECONDS / choice.rivals[0].prediction.step_seconds)
    fixed = replace(choice, rivals=tuple(_uncompiled(each) for each in choice.rivals))
    with tempfile.TemporaryDirectory() as folder:
        return choice, decide_by_trials(recipe, fixed, cluster, log=_quietly, folder=Path(folder), steps=steps)


def _uncompiled(rival: Candidate) -> Candidate:
    """The rival whose plan says itself that nothing is compiled."""
    if rival.plan is None:
        return rival
    return replace(rival, plan=replace(rival.plan, origins={**rival.plan.origins, "compute.compile": "benchmark"}))


def _quietly(line: str) -> None:
    """Only what failed is worth a line here."""
    if "failed" in line:
        log(line)


def every_plan(cell: Cell, choices: Sequence[Plan], cluster: Cluster) -> list[Plan]:
    """The plans to run: auto's choices first.

    The others are enumerated here and not by search: every split of the processes over data, tensor and pipeline, every
    ZeRO stage, microbatches of the whole share, a half and a quarter, both precisions, and the schedules that two
    stages have.  Where there are too many, every split keeps its share of a random draw; of plans in a precision that
    these cores were measured to be slower in, only a few are drawn: they take most of the time, and none comes near.
    """
    recipe = cell.recipe
    facts = facts_of(recipe)
    splits: dict[MeshPlan, list[Plan]] = {}
    for plan in _enumerated(cell, choices[0].compute.threads_per_rank):
        with suppress(PlanError):
            check_plan(plan, recipe, facts, cell.world)
            if not any(plan == replace(known, origins={}) for known in choices):
                splits.setdefault(plan.mesh, []).append(plan)
    draw = random.Random(f"{cell.name}")
    for plans in splits.values():
        draw.shuffle(plans)
    turns = [plan for turn in zip_longest(*splits.values()) for plan in turn if plan is not None]
    slow = [plan for plan in turns if _is_slow(plan, cluster)][_MOST_SLOW_PLANS:]
    return [*choices, *[plan for plan in turns if plan not in slow][: MOST_PLANS - len(choices)]]


def _is_slow(plan: Plan, cluster: Cluster) -> bool:
    """Whether products in the plan's precision were measured to be slower here than in fp32."""
    measured = cluster.nodes[0].devices.measured_flops
    return measured.get(plan.compute.precision, math.inf) < measured.get("fp32", 0.0)


def _enumerated(cell: Cell, threads: int) -> Iterator[Plan]:
    for pipeline, tensor in product(range(1, cell.world + 1), repeat=2):
        data, rest = divmod(cell.world, pipeline * tensor)
        if rest or data == 0 or cell.batch % data:
            continue
        share = cell.batch // data
        for zero, part, precision in product((0, 1, 2, 3) if data > 1 else (1,), (1, 2, 4), ("fp32", "bf16")):
            if share % part or (zero == 3 and data == 1):
                continue
            axes = {"shard": data} if zero == 3 else {"replicate": data}
            for schedule in ("1f1b", "gpipe") if pipeline > 1 and part > 1 else ("1f1b",):
                yield Plan(
                    mesh=MeshPlan(pipeline=pipeline, tensor=tensor, **axes),
                    data_parallel=DataParallelPlan(zero=zero),
                    pipeline_parallel=PipelineParallelPlan(schedule=schedule),
                    microbatch=MicrobatchPlan(size=share // part, per_step=part),
                    compute=ComputePlan(precision=precision, threads_per_rank=threads),
                )


def run_cell(cell: Cell, cluster: Cluster, rounds: int) -> dict[str, Any] | None:
    """Everything measured in a cell; None where not even the choice ran."""
    choice, tried = chosen(cell, cluster)
    choices = [choice.plan]
    with_trials = replace(tried.plan, origins=choice.plan.origins)
    if with_trials != choice.plan:
        choices.append(with_trials)
    plans = every_plan(cell, choices, cluster)
    found = time_plans(cell.recipe, plans, rounds=rounds, most=3, always=len(choices))
    timed = {at: each for at, each in enumerate(found) if isinstance(each, TimedPlan)}
    if 0 not in timed:
        log(f"{cell.name}: the choice did not run: {found[0]}")
        return None
    seconds = dict(zip(timed, step_seconds([*timed.values()]), strict=True))
    best = min((at for at in timed if timed[at].turns), key=lambda at: seconds[at])
    predicted = choice.rivals[0].prediction
    return {
        "cell": cell.name,
        "world": cell.world,
        "plans_run": len(timed),
        "chosen": _name(plans[0]),
        "best": _name(plans[best]),
        **_regret(timed[0], timed[best], ""),
        "tried": _name(plans[len(choices) - 1]),
        **_regret(timed[len(choices) - 1], timed[best], "tried_"),
        "predicted_seconds": predicted.step_seconds,
        "measured_seconds": seconds[0],
        "predicted_bytes": predicted.fullest.device,
        "measured_bytes": timed[0].peak_bytes,
        "seconds": {_name(plans[at]): each.early_seconds for at, each in timed.items()},
        "seconds_again": {_name(plans[at]): each.turns for at, each in timed.items() if each.turns},
        "failures": {_name(plans[at]): each for at, each in enumerate(found) if isinstance(each, str)},
    }


def _regret(mine: TimedPlan, best: TimedPlan, which: str) -> dict[str, Any]:
    """How much longer a step takes than the best one's, round by round."""
    ratios = [turn / other for turn, other in zip(mine.turns, best.turns, strict=True)]
    interval = [value - 1 for value in median_interval(ratios)]
    return {f"{which}regret": median(ratios) - 1, f"{which}regret_interval": interval}


def _name(plan: Plan) -> str:
    mesh = plan.mesh
    axes = f"pp{mesh.pipeline} tp{mesh.tensor} dp{mesh.replicate}x{mesh.shard}"
    schedule = f" {plan.pipeline_parallel.schedule}" if mesh.pipeline > 1 else ""
    size = f"mb{plan.microbatch.size}"
    words = f"{axes} zero{plan.data_parallel.zero} {size} {plan.compute.precision}{schedule}"
    return words if plan.memory.recompute == "none" else f"{words} recompute"


def goals(results: Sequence[Mapping[str, Any]], cores: int) -> list[Goal]:
    """Figures of the cells whose processes fit the cores; those beyond them apart."""
    made: list[Goal] = []
    for where, chosen in (
        ("", [each for each in results if each["world"] <= cores]),
        (", more processes than cores", [each for each in results if each["world"] > cores]),
    ):
        if not chosen:
            continue
        step = [abs(each["predicted_seconds"] / each["measured_seconds"] - 1) for each in chosen]
        memory = [abs(each["predicted_bytes"] / each["measured_bytes"] - 1) for each in chosen]
        made += _regret_goals(chosen, "", f", by prediction{where}")
        made += _regret_goals(chosen, "tried_", f", with trials{where}")
        made += [
            _median(f"error of the predicted step, median{where}", step, 10),
            _median(f"error of the predicted memory, median{where}", memory, 5),
        ]
    return made


def _regret_goals(chosen: Sequence[Mapping[str, Any]], which: str, where: str) -> list[Goal]:
    regret = [each[f"{which}regret"] for each in chosen]
    made: list[Goal] = []
    for words, reading in (
        ("by the median", regret),
        ("surely (95 % confidence)", [each[f"{which}regret_interval"][1] for each in chosen]),
        ("not surely beyond", [each[f"{which}regret_interval"][0] for each in chosen]),
    ):
        share = 100 * sum(value <= _NEAR for value in reading) / len(reading)
        what = f"share of {len(chosen)} cells within 5 % of the best, {words}{where}"
        made.append(Goal(what=what, measured=share, goal=90, better="higher", unit=" %"))
    return [*made, _median(f"regret, median{where}", regret, 5)]


def _median(what: str, values: Sequence[float], goal: float) -> Goal:
    low, high = spread(values)
    return Goal(
        what=what,
        measured=100 * median(values),
        goal=goal,
        better="lower",
        spread=(100 * low, 100 * high),
        unit=" %",
    )


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A row per cell, as Markdown."""
    lines = [
        "| cell | plans run | auto | with trials | fastest | regret | 95 % interval | with trials | 95 % interval"
        " | step, predicted / measured | memory |",
        "|---|--:|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for each in results:
        lines.append(
            f"| {each['cell']} | {each['plans_run']} | {each['chosen']} | {each['tried']} | {each['best']} |"
            f" {_percent(each, '')} | {_percent(each, 'tried_')} |"
            f" {each['predicted_seconds'] / each['measured_seconds']:.2f} |"
            f" {each['predicted_bytes'] / each['measured_bytes']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _percent(cell: Mapping[str, Any], which: str) -> str:
    low, high = cell[f"{which}regret_interval"]
    return f"{100 * cell[f'{which}regret']:.1f} % | {100 * low:.0f} to {100 * high:.0f} %"


def main() -> None:
    parser = options_parser(__doc__, rounds=15)
    parser.add_argument("--cells", type=int, default=None, help="only the first so many")
    options = parser.parse_args()
    known, here = known_machine(), machine()
    results: list[dict[str, Any]] = []

    def keep(results: Sequence[Mapping[str, Any]]) -> None:
        """Write what there is after each cell: a run broken off has lost nothing."""
        about = {
            "settings": {"rounds": options.rounds, "cells": len(results), "machine_was_probed": not known.note},
            "machine": here,
            "versions": versions(),
            "note": options.note,
        }
        made = goals(results, known.cluster.num_cores)
        write_result("auto", goals=made, samples={"cells": results}, about=about, folder=options.folder)
        (options.folder / "auto.md").write_text(table(results))

    for number, cell in enumerate(cells()[: options.cells]):
        log(f"{number + 1}: {cell.name}")
        found = run_cell(cell, known.cluster, options.rounds)
        if found is not None:
            results.append(found)
            tried = f"with trials {100 * found['tried_regret']:.1f} %, {found['tried']}"
            log(f"   regret {100 * found['regret']:.1f} %, {found['chosen']}; {tried}; best {found['best']}")
            keep(results)


if __name__ == "__main__":
    main()
