"""Likely causes: pieces of Weft are broken on purpose, and the sentence must name what was broken."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "parity")]

import breakages  # noqa: E402 - of the parity tests
import cells  # noqa: E402
from cells import Cell, plan  # noqa: E402
from pool import RankPool  # noqa: E402

from weft.config.plan import Plan  # noqa: E402
from weft.config.recipe import Recipe  # noqa: E402
from weft.model.blueprint import Blueprint  # noqa: E402
from weft.model.build import build_model  # noqa: E402
from weft.verify.numerics import (  # noqa: E402
    Contributions,
    Evidence,
    Trial,
    TrialResult,
    compare_results,
    contributions,
    join_trials,
    likely_cause,
    one_process,
    perturb_constants,
    run_trial,
)

STEPS = 3


def run_broken(recipe: Recipe, chosen: Plan, breakage: str) -> Trial:
    """One rank, with a piece of Weft broken and no parameter that starts constant."""
    with breakages.entered(breakage) as build:
        return run_trial(recipe, chosen, lambda: perturb_constants(build(recipe)), steps=STEPS)


@dataclass
class Bench:
    """Compares trials with one process, which runs once for every recipe and plan."""

    known: dict[str, tuple[TrialResult, Contributions]] = field(default_factory=dict)

    def explain(self, recipe: Recipe, chosen: Plan, trials: list[Trial]) -> tuple[str, str]:
        """Kind and name of the first difference, and its likely cause."""
        key = recipe.digest + chosen.digest
        if key not in self.known:
            self.known[key] = one(recipe, chosen)
        reference, apart = self.known[key]
        candidate = join_trials(trials, chosen)
        comparison = compare_results(reference, candidate, precision="fp64", order=apart.order)
        evidence = Evidence(
            plan=chosen,
            blueprint=build_model(recipe),
            reference=reference,
            candidate=candidate,
            trials=trials,
            contributions=apart,
            comparison=comparison,
        )
        first = comparison.mismatches[0]
        return f"{first.kind} {first.name}", likely_cause(evidence)


def one(recipe: Recipe, chosen: Plan) -> tuple[TrialResult, Contributions]:
    """What one process computes, and its first gradient taken apart."""

    def build() -> Blueprint:
        return perturb_constants(build_model(recipe))

    alone = one_process(chosen)
    trial = run_trial(recipe, alone, build, steps=STEPS)
    return join_trials([trial], alone), contributions(recipe, chosen, build)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


BROKEN = (
    ("dropped all-reduce", Cell("decoder", plan(replicate=2)), "gradient embedding.weight", "its own samples"),
    ("dropped all-reduce", Cell("decoder", plan(replicate=2, tensor=2)), "gradient", "sum over data ranks is missing"),
    ("last bucket not reduced", Cell("decoder", plan(shard=2, zero=1)), "gradient", "sum over data ranks is missing"),
    ("no sum over model axes", Cell("decoder", plan(tensor=2, sequence=True)), "gradient", "shards of the sequence"),
    ("no sum over model axes", Cell("decoder", plan(pipeline=2)), "gradient embedding.weight", "a tied weight"),
    (
        "untied on one rank",
        Cell("decoder", plan(pipeline=2, schedule="zbv", chunks=2)),
        "gradient embedding.weight",
        "a tied weight",
    ),
    ("mean of means", Cell("decoder", plan(replicate=2)), "loss step 1", "mean of the microbatches' own means"),
    ("dropout by rank", Cell("decoder_dropout", plan(replicate=2)), "loss step 1", "computes something else"),
    ("norm counts copies", Cell("decoder", plan(tensor=2)), "gradient norm", "every tensor rank holds count 2 times"),
    ("norm counts copies", Cell("decoder", plan(pipeline=2)), "gradient norm step 1", "tied weights count 2 times"),
)  # fmt: skip


@pytest.mark.parametrize(("breakage", "cell", "first", "cause"), BROKEN, ids=[f"{b[0]}-{b[1]}" for b in BROKEN])
def test_the_broken_piece_is_named(
    ranks: RankPool, bench: Bench, tmp_path: Path, breakage: str, cell: Cell, first: str, cause: str
) -> None:
    recipe = cells.recipe_of(cells.models(tmp_path)[cell.model], "fp64")
    trials = ranks.run(cell.world, run_broken, recipe, cell.plan, breakage)
    seen, sentence = bench.explain(recipe, cell.plan, trials)
    assert seen.startswith(first), (seen, sentence)
    assert cause in sentence, sentence


# ── numbers that no breakage makes, changed in what sound ranks saw ───────────────────────────────────────────────────

SOUND = Cell("decoder", plan(shard=2, zero=1, tensor=2))


@pytest.fixture(scope="module")
def sound(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, list[Trial]]:
    models = cells.models(tmp_path_factory.mktemp("models"))
    recipe = cells.recipe_of(models[SOUND.model], "fp64")
    return recipe, ranks.run(SOUND.world, run_sound, recipe, SOUND.plan)


def run_sound(recipe: Recipe, chosen: Plan) -> Trial:
    return run_trial(recipe, chosen, lambda: perturb_constants(build_model(recipe)), steps=STEPS)


def changed(trials: list[Trial], kind: str, scale: float, only: str = "") -> list[Trial]:
    """The trials with the tensors of a kind (of names that contain `only`) times a factor."""
    return [
        replace(
            trial,
            **{
                kind: [
                    replace(shard, tensor=shard.tensor * (scale if only in shard.name else 1.0))
                    for shard in getattr(trial, kind)
                ]
            },
        )
        for trial in trials
    ]


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [
        (2.0, "exactly 2 times too large: summed once too often, or not divided, over shard 2 or tensor 2"),
        (0.5, "exactly 1/2 of it"),
        (3.0, "over microbatches per rank 3"),
        (0.0, "zero: it never arrives"),
        (-1.0, "right but for its sign"),
        (1.25, "exactly 1.25 times the right one: a wrong divisor"),
        (3.0000001e-7, "exactly 0.00000030000001 times the right one: a wrong divisor"),
    ],
)
def test_factors(bench: Bench, sound: tuple[Recipe, list[Trial]], factor: float, sentence: str) -> None:
    recipe, trials = sound
    _, cause = bench.explain(recipe, SOUND.plan, changed(trials, "gradients", factor))
    assert cause.startswith("every gradient is")
    assert sentence in cause


def test_one_tensor_by_a_factor_names_its_kind(bench: Bench, sound: tuple[Recipe, list[Trial]]) -> None:
    recipe, trials = sound
    seen, cause = bench.explain(recipe, SOUND.plan, changed(trials, "gradients", 2.0, "blocks.1.ffn.down"))
    assert seen == "gradient blocks.1.ffn.down.weight"
    assert "exactly 2 times too large" in cause
    assert "cut over tensor" in cause


def test_a_wrong_slice_of_initial_weights(bench: Bench, sound: tuple[Recipe, list[Trial]]) -> None:
    recipe, trials = sound
    name = "model/blocks.0.ffn.up.weight"

    def other(rank: int) -> Trial:
        """The rank with the weights of the other tensor rank."""
        mine, theirs = trials[rank], trials[rank ^ 1]
        kept = [shard for shard in mine.initial if shard.name != name]
        swapped = [
            replace(shard, tensor=partner.tensor)
            for shard in mine.initial
            for partner in theirs.initial
            if shard.name == partner.name == name and shard.start == partner.start
        ]
        return replace(mine, initial=kept + swapped)

    seen, cause = bench.explain(recipe, SOUND.plan, [other(rank) for rank in range(SOUND.world)])
    assert seen == "initial weight blocks.0.ffn.up.weight"
    assert "lie in another order, [1, 0]: a wrong slice" in cause


def test_a_part_that_is_never_filled(bench: Bench, sound: tuple[Recipe, list[Trial]]) -> None:
    recipe, trials = sound
    last = changed(trials[3:], "gradients", 0.0, "attention.query")
    _, cause = bench.explain(recipe, SOUND.plan, [*trials[:3], *last])
    assert "elements are zero" in cause
    assert "rank 3" in cause


def test_replicas_that_disagree_name_their_axis(ranks: RankPool, bench: Bench, tmp_path: Path) -> None:
    cell = Cell("decoder", plan(replicate=2))
    recipe = cells.recipe_of(cells.models(tmp_path)[cell.model], "fp64")
    trials = ranks.run(2, run_sound, recipe, cell.plan)
    apart = [trials[0], *changed(trials[1:], "initial", 1.5, "blocks.2.")]
    seen, cause = bench.explain(recipe, cell.plan, apart)
    assert seen == "initial weight blocks.2.attention_norm.weight"
    assert "ranks along replicate hold different copies" in cause


def test_weights_that_never_change(bench: Bench, sound: tuple[Recipe, list[Trial]]) -> None:
    recipe, trials = sound
    stale = [replace(trial, state=trial.initial) for trial in trials]
    seen, cause = bench.explain(recipe, SOUND.plan, stale)
    assert seen.startswith("weight ")
    assert "never changed" in cause


def test_ranks_that_disagree_about_the_loss(bench: Bench, sound: tuple[Recipe, list[Trial]]) -> None:
    recipe, trials = sound
    own = [replace(trial, losses=[loss + rank for loss in trial.losses]) for rank, trial in enumerate(trials)]
    seen, cause = bench.explain(recipe, SOUND.plan, own)
    assert seen == "loss step 1"
    assert "ranks report different losses" in cause


def test_what_is_equal_departs_nowhere(sound: tuple[Recipe, list[Trial]]) -> None:
    _, trials = sound
    whole = join_trials(trials, SOUND.plan)
    comparison = compare_results(whole, whole, precision="fp64")
    assert comparison.is_equal
    assert all(value == 0.0 for value in comparison.largest.values())


def test_numbers_that_are_not_finite_equal_nothing_but_themselves() -> None:
    def outcome(loss: float) -> TrialResult:
        return TrialResult(initial={}, gradients={}, state={}, losses=[loss], norms=[1.0], validation=1.0)

    assert compare_results(outcome(math.nan), outcome(math.nan), precision="fp64").is_equal
    assert not compare_results(outcome(1.0), outcome(math.nan), precision="fp64").is_equal
    assert not compare_results(outcome(1.0), outcome(math.inf), precision="fp64").is_equal


def test_lower_precisions_are_held_to_their_own_rounding() -> None:
    def outcome(noise: float) -> TrialResult:
        gradient = torch.linspace(1.0, 2.0, 50, dtype=torch.float64)
        wave = torch.sin(torch.arange(50, dtype=torch.float64)) * noise
        made = {"gradient/a": gradient + wave, "gradient/key.bias": wave * 1e-3}
        return TrialResult(initial={}, gradients=made, state={}, losses=[1.0 + noise], norms=[1.0], validation=1.0)

    exact, alone = outcome(0.0), outcome(1e-2)
    assert compare_results(alone, outcome(2e-2), precision="bf16", exact=exact).is_equal
    comparison = compare_results(alone, outcome(2e-1), precision="bf16", exact=exact)
    assert [mismatch.name for mismatch in comparison.mismatches if mismatch.kind == "gradient"] == ["a"]
    assert comparison.num_gradients == 1  # the other one is zero in exact arithmetic


def test_one_number_may_lie_close_to_the_exact_one_by_chance() -> None:
    """Drawn gradients of one number whose terms cancel: further roundings of one process take the false alarms away,
    and what is far beyond rounding is found all the same."""
    generator = torch.Generator().manual_seed(4)

    def outcome(error: float) -> TrialResult:
        many = {f"gradient/{name}": torch.ones(50, dtype=torch.float64) for name in "abc"}
        made = many | {"gradient/scale": torch.tensor([1.0 + error], dtype=torch.float64)}
        return TrialResult(initial={}, gradients=made, state={}, losses=[1.0], norms=[1.0], validation=1.0)

    once = several = results = 0
    for _ in range(400):
        one, other, *more = (torch.randn(5, generator=generator, dtype=torch.float64) * 1e-3).tolist()
        alone, nudged = outcome(one), [outcome(one + each) for each in more]
        compare = partial(compare_results, alone, precision="fp32", exact=outcome(0.0))
        once += not compare(outcome(other)).is_equal
        several += not compare(outcome(other), nudged=nudged).is_equal
        results += not compare(outcome(0.1), nudged=nudged).is_equal
    assert once > 40
    assert several < 8
    assert results == 400
