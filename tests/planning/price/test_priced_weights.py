"""The weights that a price counts on a rank are those that the rank holds."""

from __future__ import annotations

import math

import pytest

from weft.config.plan import MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, DataRecipe, DataSource, DecoderShape, ModelRecipe, Recipe, RunRecipe
from weft.model.build import build_model
from weft.model.description import profile_of
from weft.planning.price import Memories
from weft.techniques.cost_terms import WEFT, Layout
from weft.techniques.send_trace import ModelShare
from weft.verify.dry_run import trace_sends

RECIPE = Recipe(
    model=ModelRecipe(
        reference="decoder",
        shape=DecoderShape(
            num_layers=4, hidden_size=32, num_heads=4, ffn_size=96, vocabulary_size=64, sequence_length=8,
            tie_embeddings=False, num_experts=8, expert_ffn_size=24, shared_experts=1, first_dense_layers=1,
        ),
    ),
    data=DataRecipe(train=(DataSource(source="synthetic"),)),
    batch=BatchRecipe(global_batch_size=8),
    run=RunRecipe(steps=1),
)  # fmt: skip


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("expert", [1, 2, 4])
def test_of_a_mixture(expert: int, tensor: int, context: int) -> None:
    """Experts are shared out over the expert axis, and each cut by the tensor axis beside the rest."""
    mesh = MeshPlan(shard=4, tensor=tensor, expert=expert, context=context)
    plan = Plan(mesh=mesh, microbatch=MicrobatchPlan(size=2))
    share = ModelShare(outline=trace_sends(build_model(RECIPE)), recipe=RECIPE, plan=plan, rank=0)
    held = sum(parameter.num_elements for parameter in share.held)
    layout, profile = Layout.of(plan), profile_of(RECIPE)
    assert profile is not None
    (priced,) = Memories(profile, WEFT, on_accelerator=False).of(layout, None)
    assert math.isclose(priced.kinds.weights, held * layout.element_bytes, rel_tol=1e-9)
