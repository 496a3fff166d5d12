"""What recorded runs teach prices: planted corrections are found again, and a file is not believed blindly."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.cli import run as command
from weft.config.cluster import Cluster, known_machine, parse_cluster_spec
from weft.config.recipe import load_recipe
from weft.model.description import profile_of
from weft.planning.learned import (
    MeasuredTerms,
    PricedTerms,
    RecordedRun,
    corrected_step,
    corrections_of,
    formulas_digest,
    keep_run,
    kept_runs,
    learned_here,
    price_step,
    runs_path,
    torch_version,
)
from weft.planning.price import CostModel
from weft.techniques.cost_terms import DATASHEET, ComputeCorrection, Corrections, Layout

RECIPE = Path(__file__).parents[3] / "examples" / "demo" / "recipe.toml"
PLANTED = {
    "products": 1.6, "convolutions": 0.6, "plain": 2.2, "copies": 1.3, "operator": 6e-6, "sent": 0.5,
    "collective": 8e-5, "optimizer": 1.8,
}  # fmt: skip


def made_up(draw: random.Random, *, model: str = "a", cores: float = 1.0, noise: float = 0.0) -> RecordedRun:
    """A run that took what the planted corrections say."""
    priced = PricedTerms(
        products=draw.uniform(0.01, 0.2), plain=draw.uniform(0.001, 0.05),
        convolutions=draw.choice((0.0, 0.05)), copies=draw.choice((0.0, 0.01)),
        operators=float(draw.randrange(50, 900)),
        communication=draw.uniform(0, 0.05), collectives=float(draw.randrange(1, 60)), bubble=draw.uniform(0, 0.02),
        optimizer=draw.uniform(0.0005, 0.02), other=0.002,
    )  # fmt: skip

    def noisy(seconds: float) -> float:
        return seconds * math.exp(noise * draw.gauss(0, 1))

    parts = ("products", "convolutions", "plain", "copies")
    whole = sum(PLANTED[part] * getattr(priced, part) for part in parts)
    computing = noisy(whole + PLANTED["operator"] * priced.operators)
    sent = noisy(PLANTED["sent"] * priced.communication + PLANTED["collective"] * priced.collectives)
    optimizer, bubble = noisy(PLANTED["optimizer"] * priced.optimizer), priced.bubble * computing / priced.computing
    measured = MeasuredTerms(
        computing=computing, communication=sent, bubble=bubble, optimizer=optimizer, other=0.003,
        step=computing + sent + bubble + optimizer + 0.003,
    )  # fmt: skip
    return RecordedRun(
        ended=int(time.time()) - 3600, torch=torch_version(), formulas=formulas_digest(), model=model, plan="data 2",
        precision="fp32", cores=cores, steps=60, descheduled=0.02, priced=priced, measured=measured,
    )  # fmt: skip


def error(run: RecordedRun, corrections: Corrections) -> float:
    return abs(corrected_step(run, corrections) / run.measured.step - 1)


@pytest.fixture
def machine() -> Cluster:
    return known_machine().cluster


@pytest.mark.parametrize("seed", range(8))
def test_runs_that_were_not_seen_are_predicted(seed: int) -> None:
    draw = random.Random(seed)
    runs = [made_up(draw, model=str(number % 4), noise=0.03) for number in range(24)]
    corrections = corrections_of(runs)
    others = [made_up(draw) for _ in range(40)]
    errors = sorted(error(run, corrections) for run in others)
    assert errors[20] < 0.05, corrections
    assert errors[36] < 0.15, corrections
    assert corrections.spread is not None
    assert corrections.spread < 0.12


def test_one_odd_run_does_not_move_the_rest() -> None:
    draw = random.Random(3)
    runs = [made_up(draw) for _ in range(9)]
    odd = replace(runs[0], measured=replace(runs[0].measured, computing=9 * runs[0].measured.computing))
    corrections = corrections_of([*runs, odd])
    assert all(error(run, corrections) < 0.15 for run in runs), corrections


def test_old_runs_and_those_beside_other_work_weigh_less() -> None:
    draw = random.Random(5)
    new = [made_up(draw) for _ in range(3)]
    slow = [replace(run, measured=replace(run.measured, computing=2 * run.measured.computing)) for run in new]
    even = corrections_of([*new, *slow]).compute[0].products
    old = corrections_of([*new, *(replace(run, ended=run.ended - 400 * 86_400) for run in slow)]).compute[0].products
    busy = corrections_of([*new, *(replace(run, descheduled=0.34) for run in slow)]).compute[0].products
    assert max(old, busy) < even


def test_one_run_corrects_but_not_beyond_reason() -> None:
    run = made_up(random.Random(1))
    mad = replace(run, measured=replace(run.measured, computing=1e3, optimizer=1e-9))
    row = corrections_of([mad]).compute[0]
    assert 0.25 <= row.products <= 4
    assert row.operator_seconds <= 2e-4
    assert corrections_of([run]).spread is None
    assert corrections_of([]) == Corrections()


def test_prices_in_parts_are_those_of_the_cost_model(machine: Cluster) -> None:
    profile = profile_of(load_recipe(RECIPE))
    layout = Layout(microbatch_size=2, microbatches=2, pipeline=1, replicate=2, precision="fp32", zero=1)
    priced = price_step(profile, machine, layout, 1.0)
    plain = CostModel(profile, machine, calibration=DATASHEET).predict(layout, exact=True).step_seconds
    assert priced.step == pytest.approx(plain, rel=1e-3)
    row = ComputeCorrection(
        precision="fp32", cores=1.0, products=1.7, convolutions=2.0, plain=0.6, copies=3.0, operator_seconds=3e-5
    )
    corrections = Corrections(compute=(row,), optimizer=2.0, step_seconds=0.004)
    cost_model = CostModel(profile, machine, calibration=replace(DATASHEET, corrections=corrections))
    run = replace(made_up(random.Random(0)), priced=priced)
    predicted = cost_model.predict(layout, exact=True).step_seconds
    assert predicted == pytest.approx(corrected_step(run, corrections), rel=0.02)
    assert CostModel(profile, machine, calibration=replace(DATASHEET, corrections=Corrections())).predict(
        layout, exact=True
    ) == CostModel(profile, machine, calibration=DATASHEET).predict(layout, exact=True)


def test_the_newest_runs_are_kept_and_read_back(machine: Cluster, tmp_path: Path) -> None:
    draw = random.Random(2)
    runs = [replace(made_up(draw), ended=1_700_000_000 + number) for number in range(70)]
    for run in runs:
        keep_run(run, machine, tmp_path)
    kept, note = kept_runs(machine, tmp_path)
    assert (kept, note) == (runs[6:], "")
    learned = learned_here(machine, tmp_path)
    assert learned.num_runs == 64
    assert learned.newest == runs[-1].ended
    assert "corrected by 64 recorded runs of this machine, the last of " in learned.line(0.084, 0.061)


def test_runs_of_another_torch_other_formulas_or_another_machine_say_nothing(machine: Cluster, tmp_path: Path) -> None:
    run = made_up(random.Random(2))
    keep_run(replace(run, torch="2.9.1"), machine, tmp_path)
    keep_run(replace(run, formulas="0123abcd"), machine, tmp_path)
    assert learned_here(machine, tmp_path).num_runs == 0
    assert learned_here(machine, tmp_path).calibration(DATASHEET) is DATASHEET
    keep_run(run, machine, tmp_path)
    assert learned_here(machine, tmp_path).num_runs == 1
    other = replace(machine, nodes=tuple(replace(node, cores=node.cores + 1) for node in machine.nodes))
    assert learned_here(other, tmp_path).num_runs == 0
    assert learned_here(parse_cluster_spec("8xh100"), tmp_path).num_runs == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("step = ", "step = -"), ("computing = ", "computing = 1e9 # "), ("descheduled = ", "descheduled = 7 # "),
        ("ended = ", "ended = 99_999_999_999 # "), ("products = ", "products = nan # "),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_true_are_dropped_and_the_file_is_named(
    before: str, after: str, machine: Cluster, tmp_path: Path
) -> None:
    path = keep_run(made_up(random.Random(2)), machine, tmp_path)
    keep_run(made_up(random.Random(4)), machine, tmp_path)
    path.write_text(path.read_text().replace(f"\n{before}", f"\n{after}", 1))
    learned = learned_here(machine, tmp_path)
    assert learned.num_runs <= 1
    assert str(path) in learned.note


@pytest.mark.parametrize("text", ["", "format = 7\n", "runs = 3\n", "[[runs]]\nended = 1\n", "\x00\xff = ["])
def test_a_file_that_is_none_is_not_used(text: str, machine: Cluster, tmp_path: Path) -> None:
    path = runs_path(machine, tmp_path)
    path.write_text(text)
    learned = learned_here(machine, tmp_path)
    assert learned.num_runs == 0
    assert str(path) in learned.note or not text


def test_weft_plan_shows_what_was_learned_and_predicts_without_it(
    machine: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine, draw = known_machine().cluster, random.Random(6)  # that of an empty cache

    def said(*arguments: str) -> str:
        assert command(["plan", str(RECIPE), *arguments]) == 0
        return capsys.readouterr().out

    before = said()
    assert "learned" not in before
    for number in range(6):
        keep_run(made_up(draw, model=str(number), cores=float(1 + number % 2)), machine)
    after = said()
    assert "corrected by 6 recorded runs of this machine" in after
    assert f"from {runs_path(machine)}" in after
    # Everything but how long the search took is as before.
    assert _timeless(said("--no-learned")) == _timeless(before)
    document: dict[str, Any] = json.loads(said("--json"))
    assert document["learned"]["runs"] == 6
    assert document["learned"]["uncorrected_seconds"][0] < document["plans"][0]["step_seconds"]


def _timeless(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("searched ")]
