"""Modules that do something in evaluation that they do not do in training: a split, or a cut, must fit both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.analysis.find_cut import find_cut
from weft.analysis.find_experts import look_at_experts
from weft.analysis.look import look
from weft.analysis.tensor_split.proposal import Proposal
from weft.analysis.tensor_split.propose import propose_split
from weft.config.recipe import BatchRecipe, ModelRecipe, Recipe, RunRecipe
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.model.examples import token_example
from weft.model.losses import class_loss, token_loss

Step = Callable[[Tensor], Tensor]
CHANNELS = 8
MIXING: dict[str, Step] = {
    "softmax": lambda x: x.softmax(1),
    "centred": lambda x: x - x.mean(1, keepdim=True),
    "shuffled": lambda x: x.view(len(x), 2, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2),
    "flipped": lambda x: x.flip(1),
    "largest": lambda x: x.amax(1, keepdim=True) * x,
}
ALONE: dict[str, Step] = {
    "doubled": lambda x: 2 * x,
    "clamped": lambda x: x.clamp(min=0.1),
    "pooled": lambda x: nn.functional.avg_pool2d(x, 3, 1, 1),
    "scaled": lambda x: x * x.abs().mean((2, 3), keepdim=True),
}


def when_evaluated(module: nn.Module) -> bool:
    return not module.training


def without_gradients(module: nn.Module) -> bool:
    return not torch.is_grad_enabled()


class Images(nn.Module):
    """Two convolutions, with a step between them at times."""

    def __init__(self, step: Step, when: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.step, self.when = step, when
        self.first, self.norm = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)
        self.drop, self.second = nn.Dropout(0.1), nn.Conv2d(CHANNELS, 3, 3, padding=1)
        self.last, self.other = nn.Linear(3, 10), nn.Linear(3, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(images)).relu())
        if self.when(self):
            x = self.step(x)
        return self.last(self.second(x).mean((2, 3)))


def images(module: nn.Module) -> Blueprint:
    def example(samples: int) -> dict[str, Tensor]:
        numbers = torch.empty(samples, dtype=torch.int64, device="meta")
        return {
            "images": torch.empty(samples, 3, 6, 6, device="meta"), "labels": numbers, "sample_ids": numbers.clone()
        }  # fmt: skip

    return Blueprint(
        module=module, inputs={"images": "images"}, loss=class_loss, initialise=None, example=example
    )  # fmt: skip


def kinds(proposal: Proposal) -> dict[str, str]:
    return {proposed.rule.match: proposed.rule.kind for proposed in proposal.rules}


@pytest.mark.parametrize("when", [when_evaluated, without_gradients])
@pytest.mark.parametrize("name", MIXING)
def test_channels_that_mix_in_evaluation_stay_whole(name: str, when: Callable[[nn.Module], bool]) -> None:
    proposal = propose_split(images(Images(MIXING[name], when)))
    assert not {"first", "norm"} & kinds(proposal).keys()
    assert "first" in dict(proposal.replicated)


@pytest.mark.parametrize("name", ALONE)
def test_channels_that_keep_apart_in_evaluation_are_split(name: str) -> None:
    found = kinds(propose_split(images(Images(ALONE[name], when_evaluated))))
    assert (found["first"], found["norm"], found["second"]) == ("channel_out", "channels", "channel_in")


def test_a_model_that_is_left_in_evaluation_is_looked_at_in_training() -> None:
    trained = Images(MIXING["softmax"], lambda module: module.training).eval()
    assert "first" not in kinds(propose_split(images(trained)))
    assert not trained.training


class OtherHead(Images):
    """Another head in evaluation reads what a pair has split."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        return self.last(self.second(x).mean((2, 3))) if self.training else self.other(x[:, :3].mean((2, 3)))


def test_another_head_in_evaluation_reads_what_would_be_split() -> None:
    assert "first" not in kinds(propose_split(images(OtherHead(MIXING["softmax"], when_evaluated))))


class Tokens(nn.Module):
    """Blocks one after another; what comes out may be another thing in evaluation, and blocks may see the first."""

    def __init__(self, *, returns: Step | None = None, skips: bool = False, early: bool = False) -> None:
        super().__init__()
        self.returns, self.skips, self.early = returns, skips, early
        self.embedding = nn.Embedding(64, 16)
        layers = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(16, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1 and self.early and not self.training:
                break
        if self.skips and not self.training:
            x = x + first
        logits = self.head(x)
        return logits if self.returns is None or self.training else self.returns(logits)


def tokens(module: nn.Module) -> Blueprint:
    inputs = {"tokens": "tokens"}
    return Blueprint(
        module=module, inputs=inputs, loss=token_loss, initialise=None, vocabulary_size=64, sequence_length=6,
        example=token_example(6, inputs.values()),
    )  # fmt: skip


def test_logits_that_evaluation_changes_are_gathered() -> None:
    plain = propose_split(tokens(Tokens()))
    assert plain.vocabulary_head == "head"
    changed = propose_split(tokens(Tokens(returns=lambda logits: logits.log_softmax(-1))))
    (head,) = (proposed.rule for proposed in changed.rules if proposed.rule.match == "head")
    assert (changed.vocabulary_head, head.kind, head.gather_output) == (None, "column", True)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: Tokens(skips=True), "Tokens computes something else in evaluation, where other results cross"),
        (lambda: Tokens(early=True), "head computes something else in evaluation, where layers.2 runs 0 times"),
    ],
)
def test_what_only_evaluation_sends_between_blocks_forbids_a_cut(module: Callable[[], nn.Module], reason: str) -> None:
    found = find_cut(tokens(module()))
    assert isinstance(found, str)
    assert reason in found


def test_a_cut_stays_where_evaluation_differs_inside_of_what_is_cut() -> None:
    module = Tokens()
    module.layers[1] = Deeper()
    found = find_cut(tokens(module))
    assert not isinstance(found, str)
    assert found[0].blocks == ("layers.0", "layers.1", "layers.2")


class Deeper(nn.Sequential):
    """A block that computes something else in evaluation."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        return x if self.training else x.softmax(1)


def test_an_evaluation_that_cannot_be_followed_forbids_the_split() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("no labels")

    blueprint = images(Images(fail, when_evaluated))
    look(blueprint)
    assert "in evaluation, Images cannot be described" in blueprint.why_not("tensor")


def test_experts_that_evaluation_calls_once_more_are_not_shared_out(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 24, "vocab_size": 32, "num_local_experts": 4}
    path.write_text(json.dumps({"model_type": "mixtral", **sizes}))
    model = ModelRecipe(hf=str(path), sequence_length=8)
    recipe = Recipe(model=model, batch=BatchRecipe(global_batch_size=8), run=RunRecipe(steps=1))
    blueprint = build_model(recipe)
    blueprint.stacks, blueprint.limits = {}, {}
    look_at_experts(blueprint)
    assert (len(blueprint.stacks), blueprint.why_not("expert")) == (2, "")
    block = blueprint.module.get_submodule("model.layers.1.mlp")

    class Twice(type(block)):
        def forward(self, *args: Any) -> Any:
            if not self.training:
                super().forward(*args)
            return super().forward(*args)

    block.__class__, blueprint.stacks = Twice, {}
    look_at_experts(blueprint)
    assert blueprint.why_not("expert").startswith(
        "model.layers.1.mlp.experts, a MixtralExperts, is called more than once in"
    )
