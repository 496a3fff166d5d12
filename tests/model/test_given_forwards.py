"""Hooks and forwards that single modules or parameters were given: refused, or run where nothing is split."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from weft.analysis.blueprint import build_blueprint
from weft.analysis.look import look
from weft.analysis.tensor_split.propose import propose_split
from weft.analysis.tokens.find_sequence import look_at_tokens
from weft.config.recipe import BatchRecipe, ModelRecipe, Recipe, RunRecipe
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint
from weft.model.build import build_model

VOCABULARY, TOKENS = 64, 8


def half_of(self: nn.Linear, x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(F.linear(x, self.weight))


def centred(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output - output.mean(-1, keepdim=True)


def half_gradient(module: nn.Module, given: Any, out: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in given)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -gradients[0]


class Reverser(nn.Module):
    """An own module within a model of the library."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(self.inner(x))


def hook_parameter(model: Any) -> None:
    model.lm_head.weight.register_hook(lambda gradient: gradient * 0.5)


def hook_later(model: Any) -> None:
    model.model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def give_row(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.forward = types.MethodType(half_of, layer.mlp.down_proj)


def give_head(model: Any) -> None:
    model.lm_head.forward = types.MethodType(half_of, model.lm_head)


def hook_head(model: Any) -> None:
    model.lm_head.register_forward_hook(centred)


def hook_backward(model: Any) -> None:
    model.model.layers[0].mlp.register_full_backward_hook(half_gradient)


def reverse(model: Any) -> None:
    model.model.layers[1].mlp = Reverser(model.model.layers[1].mlp)


CHANGES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda model: None,
    "eager": lambda model: None,
    "parameter": hook_parameter,
    "parameter, later": hook_later,
    "row": give_row,
    "head": give_head,
    "hook of the head": hook_head,
    "hook of a backward": hook_backward,
    "own module": reverse,
}


def build(change: str, head: str | None = None) -> Blueprint:
    """A factory."""
    attention = "eager" if change == "eager" else "sdpa"
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, use_cache=False, attn_implementation=attention,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    CHANGES[change](model)
    from weft.model.losses import token_loss

    return Blueprint(
        module=model, inputs={"input_ids": "tokens"}, loss=token_loss, initialise=None, vocabulary_size=VOCABULARY,
        sequence_length=TOKENS, vocabulary_head=head,
    )  # fmt: skip


def recipe_of(change: str, **arguments: Any) -> Recipe:
    model = ModelRecipe(factory="test_given_forwards:build", arguments={"change": change, **arguments})
    return Recipe(model=model, batch=BatchRecipe(global_batch_size=4), run=RunRecipe(steps=1))


@pytest.mark.parametrize(
    ("change", "method"),
    [("parameter", "register_hook"), ("parameter, later", "register_post_accumulate_grad_hook")],
)
def test_hooks_on_parameters_of_a_factory_are_refused(change: str, method: str) -> None:
    with pytest.raises(RecipeError, match=rf"has a hook \({method}\).*Set none in test_given_forwards:build"):
        build_model(recipe_of(change))


@pytest.mark.parametrize(
    ("change", "what"), [("head", "was given another forward"), ("hook of the head", "has hooks on its forward")]
)
def test_a_head_that_does_more_is_not_named(change: str, what: str) -> None:
    with pytest.raises(
        RecipeError, match=rf"lm_head is named as the vocabulary head.*{what} in test_given_forwards:build"
    ):
        build_model(recipe_of(change, head="lm_head"))
    assert build_model(recipe_of("nothing", head="lm_head")).vocabulary_head == "lm_head"


def looked_at(change: str) -> tuple[Blueprint, dict[str, str]]:
    """The model after a look at how it splits, and the kinds of its layers."""
    blueprint = build_model(recipe_of(change))
    look(blueprint)
    return blueprint, {rule.match: rule.kind for rule in blueprint.split}


def test_layers_that_were_given_a_forward_stay_whole() -> None:
    _, plain = looked_at("nothing")
    assert plain["model.layers.*.mlp.down_proj"] == "row"
    _, given = looked_at("row")
    assert not [match for match in given if "mlp" in match]
    assert "down_proj was given a forward of its own" in str(propose_split(build("row")))


@pytest.mark.parametrize(("change", "head"), [("nothing", "lm_head"), ("head", None), ("hook of the head", None)])
def test_a_head_that_does_more_is_not_found(change: str, head: str | None) -> None:
    blueprint, _ = looked_at(change)
    assert blueprint.vocabulary_head == head


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("nothing", ""),
        ("hook of a backward", r"model.layers.0.mlp, a LlamaMLP, has hooks on its backward"),
        ("own module", r"model.layers.1.mlp, a Reverser, is of one's own"),
    ],
)
def test_backwards_that_no_forward_shows_are_no_shared_sequence(change: str, why: str) -> None:
    blueprint = build_model(recipe_of(change))
    look_at_tokens(blueprint, 2)
    found = blueprint.limits.get("context", "")
    assert found.startswith(why)
    assert bool(found) == bool(why)


@pytest.mark.parametrize("change", ["nothing", "eager"])
def test_a_factory_attends_by_the_interface_where_ranks_share(change: str) -> None:
    assert "context" not in build_blueprint(recipe_of(change)).limits
