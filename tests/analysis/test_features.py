"""Whether looking at a forward shows that ranks may have parts of its features: nets that mix them are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.analysis.features._find_features import look_at_features
from weft.analysis.look import look
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss

VOCABULARY, LENGTH, WIDTH, HEADS = 48, 6, 16, 4


class Norm(nn.Module):
    """A root-mean-square norm of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class ShiftedNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (
            each(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class NormedHeads(Attention):
    """Normalises each head of the queries and keys, with weights that all heads share."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.of_queries, self.of_keys = norm(WIDTH // HEADS), norm(WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            each(x).view(batch, length, self.num_heads, -1) for each in (self.query, self.key, self.value)
        )
        heads = (each.transpose(1, 2) for each in (self.of_queries(query), self.of_keys(key), value))
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


Bias = Callable[[Tensor, Any], Tensor]


class BiasedHeads(Attention):
    """Adds to the scores what a table of distances has for each head."""

    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self.distances, self.bias = nn.Embedding(LENGTH, HEADS), bias
        self.register_buffer("slopes", torch.randn(1, HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            each(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        places = torch.arange(length, device=x.device)
        bias = self.bias(self.distances((places[:, None] - places).abs()).permute(2, 0, 1).unsqueeze(0), self)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class CountingHeads(Attention):
    """Knows its width, so that no table of one dimension splits it."""

    def __init__(self, scale: Callable[[Any], Any]) -> None:
        super().__init__()
        self.width, self.head_width, self.scale = WIDTH, WIDTH // HEADS, scale

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        assert width == self.width
        query, key, value = (
            each(x).view(batch, length, self.num_heads, self.head_width).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query * self.scale(self), key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


Between = Callable[[Tensor, Any], Any]


class Net(nn.Module):
    def __init__(self, between: Between, norm: Callable[[], nn.Module] = Norm) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norms = nn.ModuleList(norm() for _ in range(3))
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.between, self.width = between, WIDTH

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        hidden = hidden + self.attention(self.norms[0](hidden))
        hidden = self.between(hidden, self)
        hidden = hidden + self.drop(self.down(F.gelu(self.up(self.norms[1](hidden)))))
        return self.head(self.norms[2](hidden))


class Scaled(Net):
    def __init__(self, between: Between) -> None:
        super().__init__(between)
        self.scale = nn.Parameter(torch.ones(WIDTH))


for each in (Norm, ShiftedNorm, Net, Scaled):  # a module of one's own is refused before it is looked at
    each.__module__ = "transformers.of_this_test"


def described(module: nn.Module) -> Blueprint:
    blueprint = Blueprint(
        module=module, inputs={"input_ids": "tokens"}, loss=token_loss, initialise=None, task="causal_lm",
        vocabulary_size=VOCABULARY, sequence_length=LENGTH, example=token_example(LENGTH, ["tokens"]),
    )  # fmt: skip
    look(blueprint)
    assert blueprint.splits, blueprint.no_tensor
    look_at_features(blueprint)
    return blueprint


def looked(module: nn.Module) -> str:
    return described(module).no_grid


def as_it_is(hidden: Tensor, net: Any) -> Tensor:
    return hidden


def only_in_evaluation(hidden: Tensor, net: Any) -> Tensor:
    return hidden if net.training else hidden.softmax(-1)


def only_in(dtype: torch.dtype) -> Between:
    return lambda hidden, net: hidden.flip(-1) if hidden.dtype == dtype else hidden


def entry_overwritten(hidden: Tensor, net: Any) -> Tensor:
    made = hidden * 1.0
    made[:, :, 1] = 0.0
    return made


def written(hidden: Tensor, net: Any) -> Tensor:
    made = torch.empty_like(hidden)
    made[..., : WIDTH // 2] = hidden[..., WIDTH // 2 :]
    made[..., WIDTH // 2 :] = hidden[..., : WIDTH // 2]
    return made


FITTING: dict[str, Between] = {
    "nothing": as_it_is,
    "entry by entry": lambda hidden, net: hidden + torch.tanh(hidden) * 0.5,
    "along the tokens": lambda hidden, net: hidden + hidden.cumsum(1) / 8 + hidden.mean(1, keepdim=True),
    "within runs of features": lambda hidden, net: hidden.view(2, LENGTH, -1, 2).flip(-1).flatten(2),
    "dropout by a function": lambda hidden, net: F.dropout(hidden, 0.1),
    "buffer added": lambda hidden, net: hidden + net.table[0],
    "shape of an entry": lambda hidden, net: hidden + torch.ones(hidden[:, :, -1].shape).unsqueeze(-1),
    "the same number for all": lambda hidden, net: hidden * net.width**-0.5,
}
MIXING: dict[str, Between] = {
    "softmax": lambda hidden, net: hidden.softmax(-1),
    "slice": lambda hidden, net: hidden + hidden[..., : WIDTH // 2].repeat(1, 1, 2),
    "flip": lambda hidden, net: hidden.flip(-1),
    "roll": lambda hidden, net: hidden.roll(1, -1),
    "roll of all": lambda hidden, net: hidden.roll(1),
    "cumsum": lambda hidden, net: hidden.cumsum(-1),
    "mean": lambda hidden, net: hidden - hidden.mean(-1, keepdim=True),
    "largest": lambda hidden, net: hidden / hidden.abs().amax(-1, keepdim=True),
    "length": lambda hidden, net: hidden / hidden.square().sum(-1, keepdim=True).sqrt(),
    "sum of all": lambda hidden, net: hidden * hidden.sum(),
    "sort": lambda hidden, net: hidden.sort(-1).values,
    "buffer": lambda hidden, net: hidden @ net.table,
    "einsum": lambda hidden, net: torch.einsum("blh,hk->blk", hidden, net.table),
    "gram": lambda hidden, net: hidden + (hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden,
    "shuffle": lambda hidden, net: hidden + hidden.view(2, LENGTH, 2, -1).transpose(2, 3).flatten(2),
    "layer norm by a function": lambda hidden, net: F.layer_norm(hidden, (WIDTH,)),
    "width of the input": lambda hidden, net: hidden * hidden.shape[-1] ** -0.5,
    "width as a tensor": lambda hidden, net: hidden * torch.arange(hidden.shape[-1])[-1],
    "width on a device": lambda hidden, net: hidden * torch.tensor(hidden.shape[-1] ** -0.5, device=hidden.device),
    "width by a tensor": lambda hidden, net: hidden * hidden.new_tensor(hidden.shape[-1] ** -0.5),
    "width filled in": lambda hidden, net: hidden * hidden.new_full((1,), hidden.shape[-1]),
    "small parts": lambda hidden, net: hidden.flip(-1) if hidden.shape[-1] < WIDTH // 2 else hidden,
    "width in a reshape": lambda hidden, net: hidden.view(-1, net.width).view(hidden.shape),
    "positions of features": lambda hidden, net: hidden * (torch.arange(WIDTH) % 3),
    "weight of a layer": lambda hidden, net: hidden + F.linear(hidden, net.down.weight[:, :WIDTH]),
    "noise": lambda hidden, net: hidden + torch.randn_like(hidden),
    "dropout by a function, across": lambda hidden, net: F.dropout(hidden.transpose(0, 2), 0.1).transpose(0, 2),
    "dropout of a part": lambda hidden, net: hidden + net.drop(hidden.mean(1, keepdim=True)).transpose(1, 2).mean(),
    "joined": lambda hidden, net: torch.cat([hidden, hidden], -1)[..., ::2],
    "convolved": lambda hidden, net: F.avg_pool1d(hidden, 3, 1, 1),
    "padded": lambda hidden, net: F.pad(hidden, (1, 0))[..., :WIDTH],
    "gathered": lambda hidden, net: hidden.gather(-1, torch.zeros_like(hidden, dtype=torch.int64)),
    "squeezed out": lambda hidden, net: hidden + hidden.view(2, LENGTH, 2, -1).select(2, 0).repeat(1, 1, 2),
    "written": written,
    "in evaluation": only_in_evaluation,
    "in bfloat16": only_in(torch.bfloat16),
    "an entry": lambda hidden, net: hidden * hidden[:, :, 0].unsqueeze(-1),
    "an entry of a view": lambda hidden, net: hidden + hidden.transpose(0, 2)[-1].t().unsqueeze(-1),
    "an entry by python": lambda hidden, net: hidden if hidden[0, 0, 0].item() > 0 else -hidden,
    "an entry overwritten": entry_overwritten,
}


@pytest.mark.parametrize("between", FITTING.values(), ids=FITTING)
def test_what_works_on_parts_may_have_them(between: Between) -> None:
    assert looked(Net(between)) == ""


@pytest.mark.parametrize("between", MIXING.values(), ids=MIXING)
def test_what_mixes_features_is_refused(between: Between) -> None:
    assert looked(Net(between)) != ""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: Scaled(lambda hidden, net: hidden @ net.scale.diag()), "forward multiplies over what ranks"),
        (lambda: Net(lambda hidden, net: hidden.flip(-1)), "the model's forward runs along what ranks have parts of"),
    ],
    ids=["parameter at the top", "said where"],
)
def test_the_reason_names_what_stands_in_the_way(module: Callable[[], nn.Module], words: str) -> None:
    found = looked(module())
    assert words in found


def test_a_norm_of_another_formula_is_computed_whole() -> None:
    assert looked(Net(as_it_is, ShiftedNorm)) == ""


def test_layer_norms_and_those_of_torch_may_have_parts() -> None:
    assert looked(Net(as_it_is, lambda: nn.LayerNorm(WIDTH))) == ""
    assert looked(Net(as_it_is, lambda: nn.RMSNorm(WIDTH))) == ""
    assert looked(Net(as_it_is, lambda: nn.LayerNorm(WIDTH, elementwise_affine=False))) == ""


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_heads_work_on_each_ranks_heads(norm: Callable[[int], nn.Module]) -> None:
    net = Net(as_it_is)
    net.attention = NormedHeads(norm)
    assert looked(net) == ""


BIASES: dict[str, tuple[Bias, bool]] = {
    "as it is": (lambda bias, layer: bias, True),
    "masked": (lambda bias, layer: bias.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -1e9), True),
    "of all heads": (lambda bias, layer: bias.mean(1, keepdim=True), False),
    "of another head": (lambda bias, layer: bias.flip(1), False),
    "whole": (lambda bias, layer: layer.slopes.expand(1, HEADS, LENGTH, LENGTH), True),  # with all heads on each rank
    "of tokens": (lambda bias, layer: bias.transpose(1, 2).expand(1, LENGTH, HEADS, LENGTH)[:, :HEADS, :1], False),
}


@pytest.mark.parametrize(("bias", "fits"), BIASES.values(), ids=BIASES)
def test_what_is_added_to_scores_is_that_of_each_ranks_heads(bias: Bias, fits: bool) -> None:
    net = Net(as_it_is)
    net.attention = BiasedHeads(bias)
    assert (looked(net) == "") == fits


SCALES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a width that nobody divides": (lambda layer: layer.head_width**-0.5, True),
    "the width": (lambda layer: layer.width**-0.5, False),
    "the heads": (lambda layer: layer.num_heads, False),
    "the heads, counted": (lambda layer: torch.arange(layer.num_heads).sum(), False),
    "the heads, in a tensor": (lambda layer: torch.tensor(layer.num_heads), False),
    "the heads, filled in": (lambda layer: torch.full((), layer.num_heads), False),
}


@pytest.mark.parametrize(("scale", "fits"), SCALES.values(), ids=SCALES)
def test_numbers_that_count_features_are_divided_where_nothing_else_reads_them(
    scale: Callable[[Any], Any], fits: bool
) -> None:
    net = Net(as_it_is)
    net.attention = CountingHeads(scale)
    assert (looked(net) == "") == fits


@pytest.mark.parametrize(("dtype", "why"), [(torch.float16, "runs along"), (torch.float64, "")])
def test_what_features_do_in_fp16_alone_is_said_of_fp16(dtype: torch.dtype, why: str) -> None:
    blueprint = described(Net(only_in(dtype)))
    assert blueprint.no_grid == ""
    assert why in blueprint.no_fp16_grid
    assert bool(why) == bool(blueprint.no_fp16_grid)


def test_a_module_of_ones_own_is_not_looked_at() -> None:
    class Own(Net):
        """Of this file."""

    Own.__module__ = __name__
    assert "how features meet is known only of" in looked(Own(as_it_is))
