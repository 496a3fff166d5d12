"""The README stays short, figures are those of kept results, and the table of compositions is what plans may join."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from pages import ROOT, links

from weft.config.plan import (
    ComputePlan,
    DataParallelPlan,
    MemoryPlan,
    MeshPlan,
    MicrobatchPlan,
    PipelineParallelPlan,
    Plan,
    TensorParallelPlan,
)
from weft.config.recipe import load_recipe
from weft.errors import PlanError
from weft.model.description import facts_of
from weft.techniques.check import check_plan, check_runnable

README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "notebook" / "measured.md"
RESULTS = ROOT / "benchmarks" / "results" / "README.md"
COMPOSITIONS = ROOT / "docs" / "reference" / "compositions.md"


def rows(text: str) -> list[list[str]]:
    """The cells of every line of a table."""
    return [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("|")
    ]


def section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_the_readme_is_a_door() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    for wanted in ("pip install", "$ make demo", "$ make test", "```python", "demo.png", "torchrun", "GPUs"):
        assert wanted in text, wanted
    assert "docs/index.md" in links(README)


def test_measured_rows_are_those_of_kept_results() -> None:
    """Measured, quartiles, goal and verdict of each row are those of one row in the section that was named last."""
    text, found = MEASURED.read_text(), 0
    kept = {
        name: {tuple(cell.replace(" ", "") for cell in row[1:]) for row in rows(section(RESULTS.read_text(), name))}
        for name in re.findall(r"^## (\S+)$", RESULTS.read_text(), re.M)
    }
    name = ""
    for line in text.splitlines():
        name = (re.findall(r"results/README\.md#([\w-]+)", line) or [name])[-1]
        cells = rows(line)[0] if line.startswith("|") else []
        if len(cells) == 5 and cells[1][:1].isdigit():
            found += 1
            assert tuple(cell.replace(" ", "") for cell in cells[1:]) in kept[name], f"{cells[0]}: not in {name}"
    assert found > 30


QUOTED = {
    "1.08": "ZeRO-1 over Gloo over the best peer",
    "0.003": "model state of ZeRO 0 to 3 off its formula",
    "11.2": "from data sheets alone",
}
"""What the README says of speed, memory and predictions, and where measured.md says it."""


def test_figures_of_the_readme_are_measured_ones() -> None:
    quoted = section(README.read_text(), "What was measured")
    assert set(re.findall(r"(\d+\.\d+)(?= times| %)", quoted)) == set(QUOTED)
    for figure, place in QUOTED.items():
        line = next(line for line in MEASURED.read_text().splitlines() if place in line)
        step = 10.0 ** -len(figure.partition(".")[2])
        known = [float(value) for value in re.findall(r"\d+\.\d+(?=x| %)", line)]
        assert any(abs(float(figure) - value) < step for value in known), f"{figure} is not {known} of {place}"


def test_errors_of_predictions_are_those_of_the_shipped_page() -> None:
    """Data sheets alone, then constants of all other families, as `python -m benchmarks.planner report` wrote them."""
    accuracy = (ROOT / "docs" / "notebook" / "planner-accuracy.md").read_text()
    sheets, fitted = (row[2] for row in rows(accuracy) if row[0] == "median of families" and row[1] == "2095")
    text = " ".join(MEASURED.read_text().split())
    assert f"off by {sheets.replace('%', ' %')} from data sheets alone" in text
    assert f"by {fitted.replace('%', ' %')} for a source" in text
    assert f"off by {sheets.replace('%', ' %')} from data sheets alone" in " ".join(README.read_text().split())


TECHNIQUES: dict[str, dict[str, Any]] = {
    "data, ZeRO 0–2": {"mesh": {"replicate": 2}},
    "ZeRO 3, hybrid": {"mesh": {"shard": 2}, "data_parallel": DataParallelPlan(zero=3)},
    "tensor": {"mesh": {"tensor": 2}},
    "sequence": {"mesh": {"tensor": 2}, "tensor_parallel": TensorParallelPlan(sequence=True)},
    "context": {"mesh": {"context": 2}},
    "experts": {"mesh": {"shard": 2, "expert": 2}},
    "pipeline": {"mesh": {"pipeline": 2}},
    "recompute": {"memory": MemoryPlan(recompute="full")},
    "compile": {"compute": ComputePlan(compile=True)},
}


def joined(*names: str) -> Plan:
    """The plan that uses these techniques alone, for the demo's recipe with experts where they are asked for."""
    mesh, others = MeshPlan(), dict[str, Any]()
    for name in names:
        settings = dict(TECHNIQUES[name])
        mesh = replace(mesh, **settings.pop("mesh", {}))
        others |= settings
    per_step = 8 // mesh.data
    return Plan(mesh=mesh, microbatch=MicrobatchPlan(size=1, per_step=per_step), **others)


def refusal(plan: Plan) -> str:
    recipe = load_recipe(ROOT / "examples" / "demo" / "recipe.toml")
    try:
        facts = facts_of(recipe)
        check_plan(plan, recipe, replace(facts, num_experts=4) if plan.mesh.expert > 1 else facts)
        check_runnable(plan)
    except PlanError as error:
        return str(error)
    return ""


def test_what_composes_is_what_plans_accept() -> None:
    table = rows(COMPOSITIONS.read_text())
    names = [name for name in table[0] if name]
    cells = {row[0].strip("*"): row[1:] for row in table[2:]}
    assert names == list(TECHNIQUES) == list(cells)
    for one, two in combinations(names, 2):
        answer = cells[one][names.index(two)]
        assert answer == cells[two][names.index(one)], f"{one} and {two} are not mirrored"
        if not answer.startswith("instead"):
            assert (refusal(joined(one, two)) == "") is answer.startswith(("yes", "needs")), (one, two)


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
)
def test_which_schedules_go_with_compiled_blocks(schedule: Any) -> None:
    chunks = 1 if schedule in ("gpipe", "1f1b") else 2
    plan = replace(
        joined("pipeline", "compile"), pipeline_parallel=PipelineParallelPlan(schedule=schedule, chunks_per_rank=chunks)
    )
    splits = schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")
    assert bool(refusal(plan)) is splits
