"""Whatever model, cluster and optimizer: no plan that `weft plan` lists is one that `weft train` refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from small_families import TYPES, small_model

from weft.cli._read import describe_recipe
from weft.config.cluster import parse_cluster_spec
from weft.config.plan import MeshPlan, Plan
from weft.config.recipe import (
    BatchRecipe,
    ConvNetShape,
    DataRecipe,
    DataSource,
    DecoderShape,
    EncoderShape,
    MlpShape,
    ModelRecipe,
    OptimizerRecipe,
    PermitRecipe,
    Recipe,
    RunRecipe,
)
from weft.config.recipe import ReferenceShape as Shape
from weft.errors import PlanError
from weft.planning.search import SearchResult, recipe_space, search
from weft.techniques.check import check_plan, check_runnable

CLUSTERS = (
    "4xcpu", "2x2xcpu", "3xcpu", "8xcpu", "1xh100", "3xh100", "4xh100", "8xh100", "2x4xa100-80gb", "2x8xh100",
    "16x1xh100", "4x8xh100",
)  # fmt: skip


def drawn_shape(draw: Random) -> Shape:
    kind = draw.choice(("decoder", "decoder", "mixture", "mixture", "encoder", "mlp", "convnet"))
    heads = draw.choice((4, 6, 8, 12, 16))
    hidden, dropout = heads * draw.choice((16, 32, 64)), draw.choice((0.0, 0.1))
    if kind == "mlp":
        return MlpShape(num_layers=3, input_size=20, hidden_size=hidden, num_classes=draw.choice((7, 10)))
    if kind == "convnet":
        return ConvNetShape(num_layers=3, channels=draw.choice((8, 12)), norm=draw.choice(("batch", "group")))
    length, vocabulary = draw.choice((64, 65, 512, 4096)), draw.choice((1000, 1001, 32000))
    if kind == "encoder":
        return EncoderShape(
            num_layers=4, hidden_size=hidden, num_heads=heads, sequence_length=length, vocabulary_size=vocabulary,
            dropout=dropout,
        )  # fmt: skip
    shape = DecoderShape(
        num_layers=draw.choice((2, 4, 5, 12)), hidden_size=hidden, num_heads=heads, dropout=dropout,
        num_kv_heads=draw.choice([each for each in (1, 2, 3, 4, heads) if heads % each == 0]),
        sequence_length=length, vocabulary_size=vocabulary, tie_embeddings=draw.random() < 0.5,
    )  # fmt: skip
    if kind == "decoder":
        return shape
    return replace(
        shape, num_experts=draw.choice((4, 6, 8, 16)), top_k=draw.choice((1, 2)), shared_experts=draw.choice((0, 1)),
        first_dense_layers=draw.choice((0, 1)), router=draw.choice(("softmax", "sigmoid")),
        balance_loss_weight=draw.choice((0.0, 0.01)),
    )  # fmt: skip


def drawn_recipe(seed: int, folder: Path) -> Recipe:
    draw = Random(seed)
    if draw.random() < 0.4:
        model = replace(small_model(draw.choice(TYPES), seed, folder), sequence_length=draw.choice((15, 16, 64)))
    else:
        model = ModelRecipe(shape=drawn_shape(draw))
    reads_tokens = not isinstance(model.shape, MlpShape | ConvNetShape)
    documents = draw.choice(("packed", "isolated")) if reads_tokens else "packed"
    return Recipe(
        model=model,
        data=DataRecipe(train=(DataSource(source="synthetic"),), documents=documents),
        batch=BatchRecipe(global_batch_size=draw.choice((4, 6, 7, 8, 16, 64))),
        optimizer=OptimizerRecipe(name=draw.choice(("adamw", "adamw", "sgd", "adafactor", "lamb", "lars"))),
        run=RunRecipe(steps=5),
        permit=PermitRecipe(precision=draw.choice((("fp32",), ("bf16",), ("fp32", "bf16")))),
    )


def listed(recipe: Recipe, spec: str) -> SearchResult:
    """What `weft plan` finds, ten of it."""
    described, cluster = describe_recipe(recipe), parse_cluster_spec(spec)
    return search(
        described.profile,
        cluster,
        global_batch_size=recipe.batch.global_batch_size,
        space=recipe_space(recipe, described.profile, described.facts, cluster, Plan()),
        optimizer=recipe.optimizer,
        top=10,
    )


@pytest.mark.parametrize("seed", range(40))
def test_what_is_listed_is_trained(seed: int, tmp_path: Path) -> None:
    recipe, spec = drawn_recipe(seed, tmp_path), Random(-seed).choice(CLUSTERS)
    facts = describe_recipe(recipe).facts
    result = listed(recipe, spec)
    assert result.best or result.counts.out_of_memory or result.counts.refused
    for each in result.best:
        assert each.plan is not None
        check_runnable(each.plan)
        check_plan(each.plan, recipe, facts, each.plan.mesh.world_size)


def test_an_axis_that_is_refused_is_in_no_plan() -> None:
    """The refusals have something to refuse: of these plans some would be priced, and training takes none."""
    shape = DecoderShape(num_layers=4, hidden_size=64, num_heads=4, num_experts=4)
    recipe = Recipe(
        model=ModelRecipe(shape=shape),
        batch=BatchRecipe(global_batch_size=8),
        optimizer=OptimizerRecipe(name="adafactor"),
        run=RunRecipe(steps=1),
    )
    facts = describe_recipe(recipe).facts
    with pytest.raises(PlanError, match="adafactor"):
        check_plan(Plan(mesh=MeshPlan(replicate=2, expert=2)), recipe, facts)
    result = listed(recipe, "4xh100")
    assert result.best
    assert all(each.layout.expert == 1 for each in result.best)
    free = replace(result.space, experts=(1, 2, 4), refuses=None)
    found = search(result.profile, result.cluster, global_batch_size=8, space=free, top=10)
    assert any(each.layout.expert > 1 for each in found.best)
