"""What cannot be split is refused with the fix."""

from __future__ import annotations

import pytest
import small
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import parity
from weft.config.recipe import SplitKind
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.families import SplitRule


def attempt(what: str, world: int, sequence: bool) -> None:
    parity.build(BLUEPRINTS[what](), parity.plan_of(world, sequence))


def with_rules(*rules: SplitRule) -> Blueprint:
    return small.fused(rules=(*rules, *small.FUSED_RULES))[0]


def without(name: str) -> Blueprint:
    return small.fused(rules=[rule for rule in small.FUSED_RULES if rule.match != name])[0]


def attention() -> Blueprint:
    module = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    rules = (SplitRule(match="attention.out_proj", kind="row"),)
    return Blueprint(module=module, inputs={}, loss=small.token_loss, initialise=None, split=rules)


def clipped_embedding() -> Blueprint:
    module = nn.ModuleDict({"embedding": nn.Embedding(8, 2, max_norm=1.0)})
    rules = (SplitRule(match="embedding", kind="vocab"),)
    return Blueprint(module=module, inputs={}, loss=small.token_loss, initialise=None, split=rules)


class Doubled(nn.Conv2d):
    """Does more than convolve."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def images(*modules: nn.Module, kinds: tuple[SplitKind, ...]) -> Blueprint:
    rules = tuple(SplitRule(match=str(index), kind=kind) for index, kind in enumerate(kinds))
    return Blueprint(module=nn.Sequential(*modules), inputs={}, loss=small.token_loss, initialise=None, split=rules)


def given_another_forward() -> Blueprint:
    blueprint = small.fused()[0]
    layer = blueprint.module.get_submodule("h.0.proj")
    layer.forward = lambda x: nn.functional.linear(x, layer.weight).tanh()
    return blueprint


BLUEPRINTS = {
    "given": given_another_forward,
    "weight norm": lambda: images(
        weight_norm(nn.Conv2d(2, 4, 1, bias=False)), nn.Conv2d(4, 2, 1), kinds=("channel_out", "channel_in")
    ),
    "forward": lambda: images(nn.Conv2d(2, 4, 1), Doubled(4, 2, 1), kinds=("channel_out", "channel_in")),
    "no table": lambda: small.fused(rules=())[0],
    "heads": lambda: small.fused()[0],
    "vocabulary": lambda: Blueprint(
        module=nn.ModuleDict({"embedding": nn.Embedding(50, 4)}),
        inputs={},
        loss=small.token_loss,
        initialise=None,
        split=(SplitRule(match="embedding", kind="vocab"),),
    ),
    "tie": lambda: without("head"),
    "attention": attention,
    "not linear": lambda: with_rules(SplitRule(match="h.*.ln_1", kind="column")),
    "channels": lambda: with_rules(SplitRule(match="h.*.fc", kind="channel_out")),
    "max_norm": clipped_embedding,
    "unplaced": lambda: without("h.*.gate"),
}


@pytest.mark.parametrize(
    ("what", "world", "sequence", "message"),
    [
        ("no table", 2, False, "plan.mesh.tensor = 2, but nothing says how FusedModel splits"),
        ("heads", 3, False, "tensor = 3 does not divide num_heads = 4. Use 1, 2 or 4"),
        ("vocabulary", 4, False, r"does not divide dimension 0 of embedding.weight, \(50, 4\).*pad the size to 52"),
        ("tie", 2, False, r"wte \(vocab\) and head \(no rule\) share one parameter, wte.weight"),
        ("attention", 2, False, "inside an nn.MultiheadAttention"),
        ("not linear", 2, False, "also matches h.0.ln_1, a LayerNorm, but only a linear layer splits so"),
        ("channels", 2, False, "matches h.0.fc, a Linear, but only an nn.Conv1d, Conv2d or Conv3d with groups = 1"),
        ("weight norm", 2, False, "0.weight is computed from other parameters"),
        ("forward", 2, False, 'gives 1, a Doubled with a forward of its own, the kind "channel_in"'),
        ("given", 2, False, r'h.0.proj was given a forward of its own.*use the kind "replicate"'),
        ("max_norm", 2, False, "max_norm = 1.0, which needs all its rows"),
        ("unplaced", 2, True, "no rule says whether h.0.gate, a Linear with parameters"),
    ],
)
def test_refused(ranks, what, world, sequence, message):
    with pytest.raises(PlanError, match=message):
        ranks.run(world, attempt, what, world, sequence)
