"""Proposed split tables, judged by the gradients that two ranks compute with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from own_models import build
from pool import RankPool

from weft.analysis.tensor_split.proposal import Proposal
from weft.analysis.tensor_split.propose import propose_split
from weft.config.plan import ComputePlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, ModelRecipe, OptimizerRecipe, PermitRecipe, Recipe, RunRecipe
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.model.families import SplitRule
from weft.verify.numerics import TOLERANCES, Trial, assemble, compare, one_process, run_trial

STEPS = 2


def with_proposal(name: str) -> Blueprint:
    blueprint = build(name)
    propose_split(blueprint).apply_to(blueprint)
    return blueprint


def recipe() -> Recipe:
    return Recipe(
        model=ModelRecipe(factory="own_models:build"),
        batch=BatchRecipe(global_batch_size=8),
        run=RunRecipe(steps=STEPS),
        optimizer=OptimizerRecipe(learning_rate=1e-2),
        permit=PermitRecipe(precision=("fp64",)),
    )


def plan(tensor: int) -> Plan:
    return Plan(
        mesh=MeshPlan(tensor=tensor),
        microbatch=MicrobatchPlan(size=4, per_step=2),
        compute=ComputePlan(precision="fp64", device="cpu"),
    )


def run_rank(name: str, tensor: int) -> Trial:
    given = plan(tensor)
    wanted = given if tensor > 1 else one_process(given)
    return run_trial(recipe(), wanted, lambda: with_proposal(name), steps=STEPS)


def kinds(proposal: Proposal) -> dict[str, str]:
    return {proposed.rule.match: proposed.rule.kind for proposed in proposal.rules}


@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        "gated-gpt",
        "perceptron",
        "gated-perceptron",
        "vision",
        "torch-encoder",
        "recommender",
        "width-from-input",
    ],
)
def test_two_ranks_with_a_proposed_table_compute_the_gradients_of_one(name: str, ranks: RankPool) -> None:
    assert propose_split(build(name)).splits
    (whole,) = ranks.run(1, run_rank, name, 1)
    halves = ranks.run(2, run_rank, name, 2)
    worst = compare(assemble([whole.gradients]), assemble([trial.gradients for trial in halves]))[0]
    assert worst.relative <= TOLERANCES["fp64"], str(worst)
    assert halves[0].losses == pytest.approx(whole.losses, rel=1e-10)


def test_fused_attention_and_its_attributes() -> None:
    proposal = propose_split(build("gpt"))
    assert kinds(proposal) == {
        "tokens": "vocab",
        "blocks.*.attention.qkv": "column",
        "blocks.*.attention.proj": "row",
        "blocks.*.mlp.0": "column",
        "blocks.*.mlp.2": "row",
        "head": "column",
        "blocks.*.attention.drop": "heads",
        "blocks.*.norm1": "sequence",
        "blocks.*.norm2": "sequence",
    }
    fused = next(p.rule for p in proposal.rules if p.rule.match == "blocks.*.attention.qkv")
    assert fused.blocks == 3
    assert [(entry.match, entry.attribute) for entry in proposal.localise] == [("blocks.*.attention", "num_heads")]
    assert proposal.vocabulary_head == "head"
    assert sorted(proposal.divisible.values()) == [4, 32, 48, 48]


def test_norms_of_heads_get_their_gradients_summed() -> None:
    assert kinds(propose_split(build("vision")))["blocks.*.query_norm"] == "heads"


def test_what_cannot_be_told_that_it_has_a_part_stays_whole() -> None:
    proposal = propose_split(build("width-from-input"))
    reasons = dict(proposal.replicated)
    assert "cannot work on a part of it" in reasons["blocks.*.attention.qkv"]
    assert "blocks.*.attention.qkv" not in kinds(proposal)


def test_an_activation_whose_gradient_would_come_in_parts_forbids_the_split() -> None:
    proposal = propose_split(build("shared-gate"))
    assert not proposal.splits
    assert "shared along it" in dict(proposal.replicated)["up"]
    made = propose_split(build("made-weight"))
    assert not made.splits
    assert "what is not divided and has a gradient" in dict(made.replicated)["up"]


def test_torch_attention_is_left_whole_with_the_reason() -> None:
    reasons = dict(propose_split(build("torch-encoder")).replicated)
    assert "MultiheadAttention" in reasons["encoder.layers.*.self_attn.in_proj_weight"]


SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 16, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "row"), [("mixtral", "model.layers.*.self_attn.o_proj"), ("phi3", "model.layers.*.mlp.down_proj")]
)
def test_forwards_with_empty_slices_or_calls_without_a_result(kind: str, row: str, tmp_path: Path) -> None:
    """A mixture asserts its routing in passing; Phi-3 cuts nothing off where all of a head is turned."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **SIZES}))
    blueprint = build_model(replace(recipe(), model=ModelRecipe(hf=str(path), sequence_length=12)))
    assert kinds(propose_split(replace(blueprint, split=(), divisible={}, vocabulary_head=None)))[row] == "row"


def test_rules_that_a_model_has_stay_in_force() -> None:
    blueprint = replace(build("perceptron"), split=(SplitRule(match="4", kind="replicate"),))
    found = kinds(propose_split(blueprint))
    assert found == {"0": "column", "2": "row"}
