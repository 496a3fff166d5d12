"""The JSON Schema of a plan: kept as a file for others, true of every plan that Weft writes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from weft.config.plan import MemoryPlan, MeshPlan, MicrobatchPlan, PipelineParallelPlan, Plan, dump_plan, plan_schema

KEPT = Path(__file__).parents[2] / "docs" / "reference" / "plan.schema.json"
PLANS = (
    Plan(),
    Plan(mesh=MeshPlan(pipeline=2, replicate=2), microbatch=MicrobatchPlan(size=2, per_step=(3, 2))),
    Plan(
        mesh=MeshPlan(pipeline=3),
        pipeline_parallel=PipelineParallelPlan(schedule="gpipe", cuts=(1, 3)),
        memory=MemoryPlan(recompute=("none", "full", "selective", "full")),
    ),
)


def test_the_kept_file_is_current() -> None:
    """Mend it with: python docs/make_reference.py"""
    assert json.loads(KEPT.read_text()) == json.loads(json.dumps(plan_schema()))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("everything", [False, True])
def test_plans_are_valid(plan: Plan, everything: bool) -> None:
    schema = plan_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(tomllib.loads(dump_plan(plan, everything=everything)), schema)


@pytest.mark.parametrize(
    "text",
    ["[mesh]\ntensro = 2", "[data_parallel]\nzero = 4", '[microbatch]\nper_step = "two"', "[meshes]\n"],
)
def test_mistakes_are_not(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(text), plan_schema())


def test_every_setting_says_what_it_means() -> None:
    for section in plan_schema()["properties"].values():
        assert section["description"]
        for name, entry in section["properties"].items():
            if name not in ("threads_per_rank",):
                assert entry.get("description") or section is plan_schema()["properties"]["mesh"], name
