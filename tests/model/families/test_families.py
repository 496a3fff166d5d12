"""What the file of a family says, against its models as built: every family that there is, by discovery."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from small_families import TYPES, small_model
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import weft.model.families
from weft.analysis.describe import describe
from weft.analysis.facts import facts_of_blueprint
from weft.config.plan import Limit
from weft.config.recipe import BatchRecipe, Recipe, RunRecipe
from weft.model.build import build_model
from weft.model.description import description_of, facts_of
from weft.model.families import Tables, families, family_of
from weft.model.hf._tables import translate_plan
from weft.model.profile import Block, ModelSizes, Profile

ROUTERS = (MixtralTopKRouter, Qwen3MoeTopKRouter)
OF_EXPERTS = {"packed_colwise", "moe_tp_experts", "moe_experts_allreduce", "mla_kv_a_proj"}
"""Styles of the library for experts and latent attention, which rules about modules do not say."""


def recipe_of(model_type: str, seed: int, folder: Path) -> Recipe:
    model = small_model(model_type, seed, folder)
    return Recipe(model=model, batch=BatchRecipe(global_batch_size=4), run=RunRecipe(steps=1))


def test_families_are_found_by_the_names_of_their_files() -> None:
    files = {path.stem for path in Path(weft.model.families.__path__[0]).glob("[!_]*.py")}
    assert files == {family.model_types[0] for family in families()}
    assert len(TYPES) == len(set(TYPES)), "a type has one family"
    for kind in TYPES:
        family = family_of(kind)
        assert family is not None
        assert kind in family.model_types
    assert family_of("mamba") is None
    assert family_of("_find") is None
    assert family_of("os") is None


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_modules()]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", TYPES)
def test_a_description_is_that_of_the_model(kind: str, seed: int, tmp_path: Path) -> None:
    recipe = recipe_of(kind, seed, tmp_path)
    description, blueprint = description_of(recipe), build_model(recipe)
    assert description is not None
    module, profile = blueprint.module, description.profile
    counted = {id(p): p.numel() for p in module.parameters()}
    assert profile.num_parameters == sum(counted.values())
    assert blueprint.cut is not None
    assert len(profile.blocks) == len(blueprint.cut.blocks)
    for block, name in zip(profile.blocks, blueprint.cut.blocks, strict=True):
        assert block.parameters == sum(p.numel() for p in module.get_submodule(name).parameters())
    for name in (*blueprint.cut.stem, *blueprint.cut.tail, *blueprint.cut.blocks):
        assert module.get_submodule(name) is not None
    known, built = facts_of(recipe), facts_of_blueprint(blueprint, recipe)
    fields = ("name", "num_blocks", "divisible", "num_parameters", "hidden_size", "vocabulary_size", "sequence_length")
    fields += ("has_batch_norm", "per_sample_loss", "num_experts")
    assert {name: getattr(known, name) for name in fields} == {name: getattr(built, name) for name in fields}
    limits: tuple[Limit, ...] = ("blocks", "tensor", "expert")
    assert [known.why_not(limit) for limit in limits] == [built.why_not(limit) for limit in limits]


@pytest.mark.parametrize("kind", TYPES)
def test_every_layer_of_a_block_is_split_and_every_rule_is_about_something(kind: str, tmp_path: Path) -> None:
    blueprint = build_model(recipe_of(kind, 0, tmp_path))
    module = blueprint.module
    assert blueprint.cut is not None
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{block}.") for block in blueprint.cut.blocks)
        weight = getattr(child, "weight", None)
        if inside and weight is not None and weight.dim() == 2:
            whole = ("replicate",) if isinstance(child, ROUTERS) else ("column", "row")
            assert not blueprint.splits or blueprint.kind_of(name) in whole, name
    for rule in blueprint.split:
        if rule.divides:
            assert any(fnmatchcase(name, rule.match) for name in names(module)), rule
    assert blueprint.splits or blueprint.why_not("tensor")
    assert blueprint.vocabulary_head in names(module)


@pytest.mark.parametrize("kind", TYPES)
def test_tables_agree_with_the_library_where_it_has_its_own(kind: str, tmp_path: Path) -> None:
    blueprint = build_model(recipe_of(kind, 0, tmp_path))
    theirs, unknown = translate_plan(blueprint.module)
    assert not {*unknown} - OF_EXPERTS
    if not blueprint.splits:
        assert blueprint.why_not("tensor")
        return
    library = Tables(split=theirs)
    for name in names(blueprint.module):
        if library.kind_of(name) is not None:
            assert blueprint.kind_of(name) == library.kind_of(name), name


def flops(parts: Sequence[Block], length: int) -> float:
    return length * sum(part.forward_flops(length) for part in parts)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", TYPES)
def test_numbers_and_a_forward_give_the_same_operations(kind: str, seed: int, tmp_path: Path) -> None:
    recipe = recipe_of(kind, seed, tmp_path)
    description = description_of(recipe)
    assert description is not None
    known, found = description.profile, describe(build_model(recipe))
    length = known.sequence_length
    assert found.num_parameters == known.num_parameters
    for ours, theirs in ((known.blocks, found.blocks), ((known.tail,), (found.tail,))):
        assert flops(ours, length) == pytest.approx(flops(theirs, length), rel=1e-9)
    # Experts keep what they give for the weights of the choices, which the numbers count as one of several kernels.
    assert kept(known) == pytest.approx(kept(found), rel=0.3 if known.num_experts else 0.12)


def kept(profile: Profile) -> float:
    """Bytes of a block's activations in 16 bits."""
    operators = profile.blocks[0].operators
    return sum(2 * operator.kept_elements_per_token + operator.kept_bytes_per_token for operator in operators)


def usual_count(sizes: ModelSizes, *, gated: bool, dense_head: bool) -> tuple[float, list[float]]:
    """FLOPs of a sample, and relative costs of stem, blocks and tail, with attention's full matrix.

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, appendix.
    """
    length, hidden, query = sizes.sequence_length, sizes.hidden_size, sizes.num_heads * sizes.query_size
    projections = 2 * hidden * (query + sizes.kv_heads * sizes.query_size)
    matrices, router = 3 if gated else 2, hidden * sizes.num_experts
    feed = router + matrices * hidden * sizes.top_k * sizes.expert_ffn_size if router else 0
    weights = projections + (feed or matrices * hidden * sizes.ffn_size)
    block = 2.0 * weights * length + 4.0 * query * length * length
    head = 2.0 * length * hidden * (sizes.vocabulary_size + (hidden if dense_head else 0))
    total = 3.0 * (sizes.num_layers * block + head)
    return total, [0.05, *[1.0] * sizes.num_layers, head / block]


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "deepseek_v3"])  # of latent attention
def test_costs_are_those_of_the_usual_count(kind: str, tmp_path: Path) -> None:
    recipe = recipe_of(kind, 1, tmp_path)
    description, blueprint = description_of(recipe), build_model(recipe)
    assert description is not None
    assert description.sizes is not None
    sizes: Any = description.sizes
    total, costs = usual_count(sizes, gated=sizes.is_gated, dense_head=sizes.head == "masked")
    assert blueprint.flops_per_sample == pytest.approx(total, rel=1e-12)
    assert list(blueprint.block_costs) == pytest.approx(costs, rel=1e-12)
