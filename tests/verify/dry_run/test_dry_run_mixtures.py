"""Dry runs of mixtures of `transformers`, whose grouped products and counts fakes have no answer to in every type."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from small_families import small_model

from weft.analysis.blueprint import build_blueprint
from weft.config.plan import ComputePlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, DataRecipe, DataSource, PermitRecipe, Precision, Recipe, RunRecipe
from weft.verify.dry_run import dry_run_rank


@pytest.mark.parametrize(("tensor", "precision"), [(1, "fp32"), (1, "bf16"), (2, "fp32")])
def test_every_type_has_a_dry_run_and_torch_complains_of_none(
    tensor: int, precision: Precision, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = Recipe(
        model=small_model("mixtral", 1, tmp_path),
        data=DataRecipe(train=(DataSource(source="synthetic"),)),
        batch=BatchRecipe(global_batch_size=2),
        run=RunRecipe(steps=1),
        permit=PermitRecipe(precision=(precision,)),
    )
    plan = Plan(
        mesh=MeshPlan(tensor=tensor), microbatch=MicrobatchPlan(size=2), compute=ComputePlan(precision=precision)
    )
    with caplog.at_level(logging.WARNING):
        report = dry_run_rank(recipe, plan, lambda: build_blueprint(recipe, plan))
    assert not report.unlike_predicted
    assert bool(report.issued) == (tensor > 1)
    assert caplog.records == []
