"""Drawn programs: modules, losses and loops of public bug reports.  Under every setting each is equal to plain PyTorch,
or refused in a sentence; healthy ones are equal.  Nothing is silently other, no traceback, no hang.

`python tests/battery/run_battery.py --help` runs others and prints a table; a program is looked at with
`python tests/battery/battery_programs.py SEED`.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch
from battery_play import judged, of_error, together
from battery_programs import STRANGE, chosen, drawn
from battery_runs import SETTINGS, Found, difference
from pool import RankPool
from run_battery import findings

from weft.errors import CollectiveError, RecipeError

PACK = 10
"""Programs that the same processes play, one after another."""
CHOSEN = chosen()
PACKS = {f"chosen-{place}": CHOSEN[place : place + PACK] for place in range(0, len(CHOSEN), PACK)} | {
    f"from-{first}": range(first, first + PACK) for first in range(0, 500, PACK)
}
IN_TURN = ("data", "zero3", "tensor", "accumulate", "pipeline")


def settings_of_chosen(seed: int) -> tuple[str, ...]:
    """Two settings, so that all programs take half a minute: `make slow` plays all six."""
    return "one", IN_TURN[seed % len(IN_TURN)]


@pytest.mark.parametrize("pack", PACKS)
def test_each_program_is_equal_or_refused(ranks: RankPool, tmp_path: Path, pack: str) -> None:
    settings_of = settings_of_chosen if pack.startswith("chosen") else lambda seed: tuple(SETTINGS)
    found = findings(list(judged(ranks, tmp_path, PACKS[pack], settings_of)))
    assert not found, f"\n{found}"


def test_programs_are_drawn_by_their_seed_and_have_all_that_is_strange() -> None:
    programs = [drawn(seed) for seed in range(500)]
    assert [drawn(seed).text for seed in range(500)] == [program.text for program in programs]
    for program in programs:
        ast.parse(program.text)
    counts = Counter(len(program.strange) for program in programs)
    assert counts.keys() == {0, 1, 2}
    assert counts[0] == pytest.approx(500 / 3, abs=1)
    drawn_ones = {name for program in programs for name in program.strange}
    assert len(drawn_ones) > 0.95 * len(STRANGE)
    kinds = {kind for seed in CHOSEN for kind in drawn(seed).kinds}
    assert kinds == {part.kind for part in STRANGE}


def test_another_value_is_found() -> None:
    found = [Found([1.0] * 5, {"weight": torch.ones(3, dtype=torch.float64)}, [("norm", 1.0)]) for _ in range(2)]
    assert not difference(*found, losses=1e-10, values=1e-9)
    found[1].losses[1] = 1 + 1e-9
    assert difference(*found, losses=1e-10, values=1e-9).startswith("the loss of step 2 is 1.000000001,")
    found[1].losses[1] = 1.0
    found[1].values["weight"][2] += 1e-8
    assert difference(*found, losses=1e-10, values=1e-9) == "weight is 1.0e-08 off"
    found[1].values["weight"] = torch.ones(3)
    assert "has the dtype torch.float32" in difference(*found, losses=1e-10, values=1e-9)
    found[1].values["weight"] = found[0].values["weight"]
    found[1].notes[0] = ("norm", 2.0)
    assert difference(*found, losses=1e-10, values=1e-9).startswith("it noted norm")
    found[1].losses.pop()
    assert "steps were taken" in difference(*found, losses=1e-10, values=1e-9)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (RecipeError("x = 3 is no y. Use 4."), "refused"),
        (RecipeError("x = 3 is no y."), "WORDS"),
        (RecipeError("x = 3 is no y. Change the recipe."), "WORDS"),
        (CollectiveError("rank 1 has left. Look there."), "echo"),
        (RuntimeError("setStorage: out of bounds"), "TRACEBACK"),
        (RuntimeError("Connection closed by peer"), "echo"),
    ],
)
def test_an_error_is_a_sentence_or_a_finding(error: Exception, verdict: str) -> None:
    assert of_error(error)["verdict"] == verdict


def test_a_refusal_of_a_healthy_program_is_a_false_alarm() -> None:
    refused, echo = {"verdict": "refused", "text": ""}, {"verdict": "echo", "text": "CollectiveError: …"}
    healthy, strange = drawn(0), drawn(1)
    assert together([refused, echo], strange, "data")["verdict"] == "refused"
    assert together([refused, echo], healthy, "data")["verdict"] == "FALSE ALARM"
    assert together([echo, echo], strange, "data")["verdict"] == "refused"
    assert together([refused, {"verdict": "WRONG", "text": ""}], strange, "data")["verdict"] == "WRONG"
