"""Tensor ranks that form a grid, against one process; `make parity` has all cells of `matrix.grids`."""

from __future__ import annotations

from typing import Any

import cells
import pytest
from cells import Cell, plan
from parity_run import Matrix, run_rank
from pool import RankPool

from weft.analysis.facts import facts_of_blueprint
from weft.config.plan import Plan
from weft.config.recipe import ModelRecipe, Recipe
from weft.errors import PlanError
from weft.model.build import build_model
from weft.model.description import facts_of
from weft.techniques.check import check_plan

STEPS = 3
CELLS = (
    Cell("decoder_dropout", plan(tensor=4, grid="2d", recompute="selective")),
    Cell("encoder", plan(tensor=4, grid="2d", shard=2, zero=3)),
    Cell("hf_gpt2", plan(tensor=4, grid="2d", fused=False)),
    Cell("decoder_untied", plan(tensor=4, grid="2d", pipeline=2)),
    Cell("hf_llama", plan(tensor=8, grid="2.5d", micro=4, recompute="full")),
    Cell("decoder_dropout", plan(tensor=8, grid="3d", micro=4, fused=False, recompute="full")),
    Cell("encoder_plain", plan(tensor=8, grid="3d", micro=4, fused=False)),
)
BREAKAGES = (
    ("weights from the row", "decoder", "2d", "gradient"),
    ("norms by part", "decoder", "2d", "gradient"),
    ("copies of norms not summed", "encoder", "2d", "gradient"),
    ("dropout by rank", "decoder_dropout", "2d", "gradient"),
    ("no sum over depth", "decoder", "2.5d", "gradient"),
    ("layouts that do not change places", "decoder", "3d", ""),
)
"""Piece of Weft that is broken, the model and the grid that show it, and where."""


@pytest.fixture(scope="module")
def parity(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.create(ranks, tmp_path_factory.mktemp("models"), steps=STEPS, backend="cpu:weft")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell):
    assert parity.verdict(cell).failures("fp64") == []


def test_equals_one_process_in_fp32(parity: Matrix):
    assert parity.verdict(Cell("decoder_dropout", plan(tensor=4, grid="2d")), "fp32").failures("fp32") == []


def grid_plan(scheme: str) -> Plan:
    return plan(tensor=4, grid="2d") if scheme == "2d" else plan(tensor=8, grid=scheme, micro=4, fused=scheme != "3d")


@pytest.mark.parametrize(("breakage", "model", "scheme", "seen_in"), BREAKAGES, ids=[each[0] for each in BREAKAGES])
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, model: str, scheme: str, seen_in: str):
    failures = parity.verdict(Cell(model, grid_plan(scheme)), breakage=breakage).failures("fp64")
    assert any(seen_in in failure for failure in failures), failures


REFUSED = {
    "mlp": "how features meet is known only of Weft's decoder and encoder",
    "convnet": "how features meet is known only of Weft's decoder and encoder",
    "own": "how features meet is known only of Weft's decoder and encoder",
    "looked": "how features meet is known only of Weft's decoder and encoder",
    "lora": "cannot be had with model.adapter",
}
"""Model → why its tensor ranks form no grid."""


@pytest.mark.parametrize("model", REFUSED)
def test_models_of_which_no_grid_is_known_are_refused_by_name(parity: Matrix, model: str):
    with pytest.raises(PlanError, match=REFUSED[model]):
        parity.run(cells.recipe_of(parity.models[model], "fp64"), plan(tensor=4, grid="2d", micro=12))


def test_a_model_of_a_factory_is_refused_when_it_is_built_also_by_ranks(parity: Matrix):
    recipe, chosen = cells.recipe_of(ModelRecipe(factory="parity_models:build_own_decoder"), "fp64"), grid_plan("2d")
    with pytest.raises(PlanError, match=REFUSED["own"]):
        check_plan(chosen, recipe, facts_of_blueprint(build_model(recipe), recipe))
    with pytest.raises(PlanError, match=REFUSED["own"]):
        parity.ranks.run(4, run_rank, recipe, chosen, 1, backend=parity.backend)


@pytest.mark.parametrize("model", ["encoder", "hf_gpt2", "hf_bert"])
def test_cubes_drop_no_attention(parity: Matrix, model: str):
    recipe = cells.recipe_of(parity.models[model], "fp64")
    for facts in (facts_of(recipe), facts_of_blueprint(build_model(recipe), recipe)):
        check_plan(grid_plan("2d"), recipe, facts)
        with pytest.raises(PlanError, match="its attention drops probabilities of samples"):
            check_plan(grid_plan("3d"), recipe, facts)


def of_sizes(**sizes: Any) -> Recipe:
    return cells.recipe_of(cells.decoder(**sizes), "fp64")


@pytest.mark.parametrize(
    ("sizes", "chosen", "words"),
    [
        ({"num_kv_heads": 1}, plan(tensor=4, grid="2d"), r"cannot cut num_kv_heads = 1 into 2 parts"),
        ({"ffn_size": 51}, plan(tensor=4, grid="2d"), r"cannot cut ffn_size = 51 into 2 parts"),
        ({"vocabulary_size": 63}, plan(tensor=4, grid="2d"), r"cannot cut vocabulary_size = 63 into 2 parts"),
        ({}, plan(tensor=6, grid="2d"), r"needs a square, and 6 ranks are none\.\nUse mesh\.tensor = 4"),
        ({}, plan(tensor=4, grid="2.5d"), r'one layer of 4 ranks\.\nUse "2d"'),
        ({}, plan(grid="2d"), r"has no effect with mesh\.tensor = 1"),
        ({}, plan(tensor=4, grid="2d", micro=3), r"does not share out over the 2 parts .*\nUse 4"),
        ({}, plan(tensor=8, grid="2.5d", micro=6), r"does not share out over the 4 parts .*\nUse 8"),
        ({}, plan(tensor=4, grid="2d", sequence=True), r"no activation is on two ranks"),
        (
            {},
            plan(tensor=4, grid="2d", context=2),
            r"cannot join mesh\.context = 2: the two have not",
        ),
        ({}, plan(tensor=4, grid="2d", compiled=True), r"no code for a compiler"),
        (
            {},
            plan(tensor=4, grid="2d", pipeline=2, schedule="zbv", chunks=2),
            r'cannot join .*schedule = "zbv": the two have not',
        ),
        ({}, plan(tensor=8, grid="3d", micro=4), r"cannot join a fused loss: logits are sums over ranks"),
        ({}, plan(tensor=8, grid="3d", micro=6, fused=False), r"does not share out over the 4 parts .*\nUse 8"),
        ({"ffn_size": 50}, plan(tensor=8, grid="3d", micro=4), r"cannot cut ffn_size = 50 into 4 parts"),
    ],
    ids=lambda value: None if isinstance(value, dict) else cells.name_of(value) if isinstance(value, Plan) else "",
)
def test_what_makes_no_grid_is_refused_with_the_change_to_make(sizes: dict[str, int], chosen: Plan, words: str):
    recipe = of_sizes(**sizes)
    with pytest.raises(PlanError, match=words):
        check_plan(chosen, recipe, facts_of(recipe))


def test_optimizers_of_whole_tensors_are_refused():
    recipe = cells.recipe_of(cells.decoder(), "fp64", name="adafactor")
    with pytest.raises(PlanError, match='optimizer.name = "adafactor", which looks at whole tensors'):
        check_plan(plan(tensor=4, grid="2d"), recipe, facts_of(recipe))
