"""Stacked experts of transformers are those that are shown to be: by a small copy, and by how a forward calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock

from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.config.plan import MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, ModelRecipe, Recipe, RunRecipe
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.stacked import ExpertStack, num_stacked, prove_stacks
from weft.techniques.check import check_plan

EXPERTS, HIDDEN, FFN = 4, 12, 20


def prove(module: nn.Module, *, choices_first: bool = True) -> ExpertStack | None:
    return prove_stacks({"experts": (module, choices_first)})["experts"]


class Written(nn.Module):
    """Experts as an own class would write them, with something else about them."""

    def __init__(self, other: str = "", width: int = FFN) -> None:
        super().__init__()
        self.num_experts, self.other = EXPERTS, other
        self.wide = nn.Parameter(torch.empty(EXPERTS, 2 * width, HIDDEN))
        self.narrow = nn.Parameter(torch.empty(EXPERTS, HIDDEN, width))
        if other == "shared":
            self.scale = nn.Parameter(torch.empty(HIDDEN))
        if other == "noted":
            self.register_buffer("seen", torch.zeros(EXPERTS))
        self.dropout = nn.Dropout(0.5 if other == "drops" else 0.0)

    def act_fn(self, made: Tensor) -> Tensor:
        gate, up = made.chunk(2, -1)
        if self.other == "rows":  # of one expert change one another
            gate = gate - gate.mean(0)
        made = self.dropout(F.gelu(gate) * up)
        return F.dropout(made, 0.5, self.training) if self.other == "drops by a function" else made

    def forward(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        if self.other == "clamps":  # farther out than drawn numbers go
            tokens = tokens.clamp(-30.0, 30.0)
        if self.other == "prunes":
            tokens = torch.where(tokens.abs() < 1e-4, 0.0, tokens)
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(choices == expert)
            read = (expert + 1) % EXPERTS if self.other == "neighbour" else expert
            made = self.act_fn(F.linear(tokens[token], self.wide[expert])) @ self.narrow[read].T
            weight = weights[token, choice, None]
            if self.other == "squares":
                weight = weight.square()
            if self.other == "detached":
                weight = weight.detach()
            result = result.index_add(0, token, made * weight)
        if self.other == "doubled in evaluation" and not self.training:
            result = 2 * result
        if self.other == "tokens":
            result = result + tokens
        if self.other == "capacity":
            result = result * (torch.bincount(choices.flatten(), minlength=EXPERTS).max() < len(tokens))
        return result


def test_experts_are_proven_by_what_they_compute() -> None:
    stack = prove(Written())
    assert stack == ExpertStack(EXPERTS, "wide", "narrow", "", "", False, "act_fn")
    assert prove(Written(width=4096)) == stack, "a small copy stands for a wide one"


@pytest.mark.parametrize(
    "other",
    ["rows", "neighbour", "squares", "detached", "tokens", "capacity", "shared", "noted", "clamps", "prunes"],
)
def test_what_computes_something_else_is_not_proven(other: str) -> None:
    assert prove(Written(other)) is None


def test_a_forward_that_a_module_was_given_is_not_its_class_s() -> None:
    plain, given = Written(), Written()
    given.forward = lambda *called: 0.5 * Written.forward(given, *called)  # type: ignore[method-assign]
    found = prove_stacks({"plain": (plain, True), "given": (given, True)})
    assert found["plain"] is not None
    assert found["given"] is None


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("other", ["drops", "drops by a function", "doubled in evaluation"])
def test_what_training_changes_is_seen_however_a_module_was_left(other: str, trains: bool) -> None:
    module = Written(other).train(trains)
    assert prove(module) is None
    assert [each.training for each in module.modules()] == [trains, trains]


def of_library(kind: Any, config: Any) -> nn.Module:
    config._experts_implementation = "eager"
    with torch.device("meta"):
        return kind(config)


def test_experts_of_the_library_are_proven_at_full_width() -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig

    mixtral, biased = of_library(MixtralExperts, MixtralConfig()), of_library(GptOssExperts, GptOssConfig())
    assert (num_stacked(mixtral), num_stacked(biased)) == (8, 128)
    found, with_biases = prove(mixtral), prove(biased)
    assert found is not None
    assert with_biases is not None
    assert not found.is_transposed
    assert with_biases.is_transposed
    assert with_biases.up_bias == "gate_up_proj_bias"


# ── how a forward calls them ─────────────────────────────────────────────────────────────────────────────────────────


def looked_at(folder: Path, **config: Any) -> Blueprint:
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
        "max_position_embeddings": 64, "num_experts_per_tok": 2, "intermediate_size": 20, "moe_intermediate_size": 20,
        "head_dim": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(sizes | config))
    model = ModelRecipe(hf=str(path), sequence_length=11)
    recipe = Recipe(model=model, batch=BatchRecipe(global_batch_size=4), run=RunRecipe(steps=1))
    return build_blueprint(recipe, Plan(mesh=MeshPlan(shard=2, expert=2)))


def test_a_family_without_a_file_is_looked_at(tmp_path: Path) -> None:
    blueprint = looked_at(tmp_path, model_type="olmoe", architectures=["OlmoeForCausalLM"], num_experts=6)
    assert blueprint.experts == {f"model.layers.{layer}.mlp.experts": 6 for layer in range(2)}
    assert blueprint.why_not("expert") == ""


def test_a_family_whose_experts_all_compute_everything_is_refused(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "intermediate_size_mlp": 20, "interleave_moe_layer_step": 1}
    blueprint = looked_at(tmp_path, model_type="llama4_text", architectures=["Llama4ForCausalLM"], **sizes)
    assert blueprint.experts == {}
    assert "Llama4TextExperts, is not called with tokens, choices and their weights" in blueprint.why_not("expert")
    recipe = Recipe(
        model=ModelRecipe(factory="a:model"), batch=BatchRecipe(global_batch_size=4), run=RunRecipe(steps=1)
    )
    plan = Plan(mesh=MeshPlan(shard=2, expert=2), microbatch=MicrobatchPlan(size=2, per_step=1))
    with pytest.raises(
        PlanError, match=r"cannot share out the experts of a llama4_text: model\.layers\.0\.feed_forward"
    ):
        check_plan(plan, recipe, facts_of_blueprint(blueprint, recipe))


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("parameters", "has parameters that model.layers.0.mlp reads"),
        ("twice", "is called more than once"),
        ("other tokens", "is called with choices or weights of other tokens"),
    ],
)
def test_forwards_that_use_experts_otherwise_are_refused(
    way: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights, choices = self.gate(flat)
        if way == "other tokens":
            return self.experts(flat, choices[:, :1], weights).view_as(hidden_states)
        made = self.experts(flat, choices, weights)
        again = self.experts(made, choices, weights) if way == "twice" else self.experts.down_proj.sum()
        return (made + again).view_as(hidden_states)

    monkeypatch.setattr(OlmoeSparseMoeBlock, "forward", forward)
    blueprint = looked_at(tmp_path, model_type="olmoe", architectures=["OlmoeForCausalLM"], num_experts=6)
    assert blueprint.experts == {}
    assert blueprint.why_not("expert").startswith("model.layers.0.mlp.experts, a OlmoeExperts, ")
    assert said in blueprint.why_not("expert")


def test_a_block_of_the_library_is_what_its_stack_says() -> None:
    """Of all its experts at once, in fp64, with the router that it has."""
    config: Any = MixtralConfig(hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(3)
    block = MixtralSparseMoeBlock(config).double()
    for parameter in block.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    stack = prove(block.experts)
    assert stack is not None
    tokens = torch.randn(7, HIDDEN, generator=generator, dtype=torch.float64)
    _, weights, choices = block.gate(tokens)
    wanted = block.experts(tokens, choices, weights)
    torch.testing.assert_close(stack.mix(block.experts, tokens, choices, weights), wanted, rtol=1e-12, atol=1e-12)
