"""Networks that do in evaluation what they do not do in training: on two ranks they compute what one process does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from drawn_nets import drawn_net
from pool import RankPool

from weft.analysis.look import look
from weft.config.plan import ComputePlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, ModelRecipe, PermitRecipe, Recipe, RunRecipe
from weft.verify.numerics import Trial, assemble, compare, one_process, run_trial

SEEDS = (1, 71, 87, *range(2, 11))
"""Drawn ones, the first three of which were split wrongly once."""
TOLERANCE = 1e-8
"""Of a bias before a norm, which has no gradient but rounding, 3e-10 is seen."""
RECIPE = Recipe(
    model=ModelRecipe(factory="drawn_nets:drawn_net"),
    batch=BatchRecipe(global_batch_size=4),
    run=RunRecipe(steps=2),
    permit=PermitRecipe(precision=("fp64",)),
)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a rank saw of a network; nothing: it stays whole."""

    trial: Trial | None
    problem: str = ""


def run_all(seeds: tuple[int, ...], tensor: int) -> list[Ran]:
    plan = Plan(
        mesh=MeshPlan(tensor=tensor),
        microbatch=MicrobatchPlan(size=4),
        compute=ComputePlan(precision="fp64", device="cpu"),
    )
    found: list[Ran] = []
    for seed in seeds:
        looked_at = drawn_net(seed)
        look(looked_at)
        if not looked_at.splits:
            found.append(Ran(None))
            continue
        given, blueprint = (one_process(plan), drawn_net(seed)) if tensor == 1 else (plan, looked_at)
        try:
            found.append(Ran(run_trial(RECIPE, given, lambda blueprint=blueprint: blueprint, steps=2)))
        except Exception as error:
            found.append(Ran(None, f"{type(error).__name__}: {error}"))
    return found


def difference(whole: Ran, halves: list[Ran]) -> str:
    """What two ranks compute otherwise; empty: nothing."""
    trials = [half.trial for half in halves]
    if whole.problem or any(half.problem for half in halves):
        return whole.problem or halves[0].problem
    if whole.trial is None or trials[0] is None or trials[1] is None:
        return ""
    worst = compare(assemble([whole.trial.gradients]), assemble([t.gradients for t in trials if t is not None]))[0]
    if worst.relative > TOLERANCE:
        return str(worst)
    if trials[0].losses != pytest.approx(whole.trial.losses, rel=1e-9):
        return f"losses {trials[0].losses} instead of {whole.trial.losses}"
    if trials[0].validation != pytest.approx(whole.trial.validation, rel=1e-9):
        return f"in evaluation {trials[0].validation} instead of {whole.trial.validation}"
    return ""


def test_drawn_networks_compute_what_one_process_does(ranks: RankPool) -> None:
    (whole,) = ranks.run(1, run_all, SEEDS, 1, timeout=240)
    halves = ranks.run(2, run_all, SEEDS, 2, timeout=240)
    found = {seed: difference(whole[at], [rank[at] for rank in halves]) for at, seed in enumerate(SEEDS)}
    assert {seed: problem for seed, problem in found.items() if problem} == {}
    assert sum(ran.trial is not None for ran in whole) >= len(SEEDS) // 2, "most are split"
