"""Losses that see the whole batch: under data ranks, which gather their samples, what one process computes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import cells
import pytest
from benchmarks.families._draw import _small_form  # pyright: ignore[reportPrivateUsage]
from benchmarks.families._kinds import families_of
from pair_models import FORMS, LOSSES, run_looked
from parity_run import joined, judge, run_rank
from pool import RankPool
from predicted import unlike_predicted

from weft.analysis.blueprint import build_blueprint
from weft.config.plan import Plan
from weft.config.recipe import ModelRecipe, Recipe
from weft.verify.dry_run import dry_run_rank, trace_sends
from weft.verify.numerics import one_process

STEPS = 2
ALONE = one_process(cells.plan())
PLANS: dict[str, Plan] = {
    "data": cells.plan(replicate=2, micro=6),
    "zero 1": cells.plan(shard=2, zero=1, micro=6),
    "zero 2": cells.plan(shard=2, zero=2, micro=6),
    "zero 3": cells.plan(shard=2, zero=3, micro=6),
    "data 4": cells.plan(replicate=2, shard=2, zero=1, micro=3),
    "data 3": cells.plan(shard=3, zero=3, micro=4),
    "data and tensor": cells.plan(shard=2, tensor=2, zero=1, micro=6),
    "zero 3 and tensor": cells.plan(shard=2, tensor=2, zero=3, micro=6),
}
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "max_position_embeddings": 16, "projection_dim": 24, "eos_token_id": 63, "bos_token_id": 62, "pad_token_id": 1,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8, "projection_dim": 24,
}  # fmt: skip


def dual_encoder(kind: str, folder: Path) -> Recipe:
    config = {
        "model_type": kind,
        "architectures": [{"clip": "CLIPModel", "siglip": "SiglipModel"}[kind]],
        "projection_dim": 24,
        "text_config": TEXT | {"model_type": f"{kind}_text_model"},
        "vision_config": VISION | {"model_type": f"{kind}_vision_model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return cells.recipe_of(ModelRecipe(hf=str(folder), sequence_length=16), "fp64")


def own(form: str, loss: str) -> Recipe:
    return cells.recipe_of(
        ModelRecipe(factory="pair_models:build_pairs", arguments={"form": form, "loss": loss}), "fp64"
    )


def failures(ranks: RankPool, recipe: Recipe, plan: Plan, breakage: str | None = None) -> list[str]:
    """What differs from one process, or from the predicted program."""
    wanted = joined(ranks.run(1, run_looked, recipe, ALONE, STEPS), ALONE)
    if breakage is not None:
        broken = joined(ranks.run(plan.mesh.world_size, run_rank, recipe, plan, STEPS, breakage), plan)
        return judge(wanted, broken).failures("fp64")
    trials = ranks.run(plan.mesh.world_size, run_looked, recipe, plan, STEPS)
    blueprint = build_blueprint(recipe, plan)
    unpredicted = unlike_predicted(recipe, plan, blueprint, trace_sends(blueprint), trials)
    return [*judge(wanted, joined(trials, plan)).failures("fp64"), *unpredicted]


@pytest.mark.parametrize("name", ["data", "zero 3", "data and tensor"])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_dual_encoders_by_folder(ranks: RankPool, kind: str, name: str, tmp_path: Path) -> None:
    assert failures(ranks, dual_encoder(kind, tmp_path), PLANS[name]) == []


FAMILIES = ("altclip", "chinese_clip", "clipseg", "metaclip_2", "tipsv2")
"""Further families with such a loss that have a small form; the code names none of them."""


@pytest.mark.parametrize("name", random.Random(13).sample(FAMILIES, 2))
def test_a_drawn_family_by_folder(ranks: RankPool, name: str, tmp_path: Path) -> None:
    family = next(one for kind in ("vision", "image-text") for one in families_of(kind) if one.model_type == name)
    _small_form(family, "vision", tmp_path)
    recipe = cells.recipe_of(ModelRecipe(hf=str(tmp_path / name), sequence_length=16), "fp64")
    assert failures(ranks, recipe, PLANS["zero 3"]) == []


@pytest.mark.parametrize("seed", range(8))
def test_drawn_towers(ranks: RankPool, seed: int) -> None:
    drawn = random.Random(seed)
    form, loss, name = FORMS[seed % len(FORMS)], drawn.choice(LOSSES), drawn.choice([*PLANS])
    assert failures(ranks, own(form, loss), PLANS[name]) == [], (form, loss, name)


@pytest.mark.parametrize("form", ["outside", "matmul"])
@pytest.mark.parametrize("breakage", ["samples without gradients to others", "samples from another rank's offset"])
def test_a_broken_gather_is_seen(ranks: RankPool, breakage: str, form: str) -> None:
    assert any("gradient" in failure for failure in failures(ranks, own(form, "softmax"), PLANS["data"], breakage))


@pytest.mark.parametrize("name", [*PLANS])
def test_a_dry_run_gathers_what_is_predicted(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    for recipe in (dual_encoder("clip", tmp_path), own("outside", "softmax"), own("both ways", "sigmoid")):
        report = dry_run_rank(recipe, plan, lambda recipe=recipe: build_blueprint(recipe, plan))
        assert report.unpredicted == ()
        assert report.unlike_predicted == ()
