"""A mixture of 8 experts, of which a token visits two, on two ranks of one thread each: Weft and tuned `fully_shard`.

The model is a Mixtral of `transformers`, the same for all, with the same first weights, data and optimizer.  Rivals
have what a careful person tries: the library's implementations of experts for CPUs, weights that stay gathered between
forward and backward, the fused optimizer, fp32 and bf16.  Figures are ratios of the same rounds, same precision with
same precision.  DeepSpeed's mixtures are layers of its own, whose experts have a capacity and drop tokens: they train
another model, so they do not take part.

Then one layer alone, forward and backward: how much of it is permuting rows and sending them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks._contender import Block, Contender, Entry, contenders, interleave
from benchmarks._mixture import BATCH, CONFIG, RANKS, SAMPLES, plan_of_experts, recipe_of, write_config
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._statistics import round_ratios, spread
from weft.config.cluster import known_machine
from weft.config.plan import ExpertParallelPlan, dump_plan
from weft.model.description import facts_of, profile_of
from weft.planning.search import choose_plan

_WEFT, _FSDP, _LAYER = (f"benchmarks._mixture:{name}" for name in ("weft", "fsdp", "layer"))
_EXPERTS = ("grouped_mm", "eager")
"""The library's implementations; `batched_mm` copies the matrices of every row, and takes a multiple of the time."""
_PRECISIONS = ("fp32", "bf16")
_GOAL, _SHARE = 1.5, 0.15
_LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}


def main() -> None:
    options = options_parser(__doc__, rounds=5)
    options.add_argument("--steps", type=int, default=2, help="steps of a contender in a round")
    options.add_argument("--precisions", nargs="*", default=_PRECISIONS, help="of fp32 and bf16")
    given = options.parse_args()
    about: dict[str, Any] = {"machine": machine(), "versions": versions("transformers"), "note": given.note}
    folder = write_config()
    samples: dict[str, Any] = {}
    goals: list[Goal] = []
    try:
        for precision in given.precisions:
            found = _trained(str(folder), precision, rounds=given.rounds, steps=given.steps)
            samples[precision] = found
            goals.append(_speed(precision, found))
        samples["layer"] = {each: _layer(str(folder), each, given.rounds) for each in given.precisions}
    finally:
        shutil.rmtree(folder)
    goals += [_share(precision, shares) for precision, shares in samples["layer"].items()]
    settings = {"config": CONFIG, "samples per rank": BATCH, "ranks": RANKS, **SAMPLES}
    settings |= {"rounds": given.rounds, "steps": given.steps}
    write_result("mixtures", goals=goals, samples=samples, about={**about, "settings": settings}, folder=given.folder)


def _entries(folder: str, precision: str) -> tuple[list[Entry], list[Entry]]:
    """Weft with experts on two ranks, whose tokens travel either way, and with the plan that it chooses; and rivals."""
    common = {"folder": folder, "precision": precision}
    plans = {
        "expert 2": (plan_of_experts(precision), 1, RANKS),
        "gathered": (plan_of_experts(precision, ExpertParallelPlan(exchange="all_gather")), 1, RANKS),
        "chosen": _chosen(folder, precision),
    }
    own = [
        Entry(name=f"weft {kind}", target=_WEFT, settings={**common, "plan": plan, "threads": threads}, ranks=ranks)
        for kind, (plan, threads, ranks) in plans.items()
    ]
    rivals = [
        Entry(name=f"fsdp {experts}", target=_FSDP, settings={**common, "experts": experts}) for experts in _EXPERTS
    ]
    return own, rivals


def _chosen(folder: str, precision: str) -> tuple[str, int, int]:
    """The plan that the search finds for this machine, its threads and its ranks."""
    recipe, known = recipe_of(folder, (precision,)), known_machine()
    profile = profile_of(recipe)
    assert profile is not None, "a family with a file"
    plan = choose_plan(recipe, known.cluster, facts_of(recipe), profile=profile).plan
    log(f"chosen in {precision}: {plan.mesh}")
    return dump_plan(plan, everything=True), plan.compute.threads_per_rank, plan.mesh.world_size


def _trained(folder: str, precision: str, *, rounds: int, steps: int) -> dict[str, Any]:
    own, rivals = _entries(folder, precision)
    with contenders([*own, *rivals], warmup_steps=3) as alive:
        _check_losses(alive, _LOSS_TOLERANCE[precision])
        blocks = interleave(alive, rounds=rounds, steps=steps)
    found: dict[str, Any] = {}
    for entry in (*own, *rivals):
        if entry.name in blocks:
            seconds = _seconds(blocks[entry.name])
            found[entry.name] = {"seconds": seconds, "tokens_per_second": _tokens(seconds)}
            log(f"{precision} {entry.name:18s} {_tokens(seconds):7.0f} tokens/s")
    return found


def _check_losses(alive: Sequence[Contender], tolerance: float) -> None:
    """Everybody trains the same model on the same data."""
    first = alive[0].warm_losses
    for other in alive[1:]:
        for mine, theirs in zip(first, other.warm_losses, strict=True):
            assert abs(mine - theirs) < tolerance, f"{other.entry.name} has a loss of {theirs}, not {mine}"


def _seconds(blocks: Sequence[Block]) -> list[float]:
    return [median(block.seconds) for block in blocks]


def _tokens(seconds: Sequence[float]) -> float:
    return BATCH * RANKS * SAMPLES["sequence_length"] / median(seconds)


def _speed(precision: str, found: Mapping[str, Any]) -> Goal:
    """The best of Weft beside the best of the others."""

    def best(prefix: str) -> str:
        return min((name for name in found if name.startswith(prefix)), key=lambda name: median(found[name]["seconds"]))

    ours, theirs = best("weft"), best("fsdp")
    ratios = round_ratios(found[theirs]["seconds"], found[ours]["seconds"])
    what = f"{precision}: tokens per second of {ours} beside {theirs}"
    return Goal(what=what, measured=median(ratios), goal=_GOAL, better="higher", spread=spread(ratios))


def _layer(folder: str, precision: str, rounds: int) -> list[float]:
    """Shares of permuting and sending, of each step."""
    settings = {"folder": folder, "precision": precision, "plan": plan_of_experts(precision)}
    with contenders([Entry(name=f"layer {precision}", target=_LAYER, settings=settings)], warmup_steps=3) as alive:
        return [share for _ in range(rounds) for share in alive[0].run(4).losses]


def _share(precision: str, shares: Sequence[float]) -> Goal:
    what = f"{precision}: share of permuting and sending in a mixture"
    return Goal(what=what, measured=median(shares), goal=_SHARE, better="lower", spread=spread(shares))


if __name__ == "__main__":
    main()
