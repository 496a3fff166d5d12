"""Whether ranks may share the sequence of a model that says nothing: found where tokens meet in attention alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.analysis.tokens.find_sequence import SharedSequence, find_shared_sequence
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss

LENGTH, WIDTH, HEADS = 12, 8, 2
Step = Callable[["Model", Tensor], Tensor]


def rotate(model: Model, x: Tensor) -> Tensor:
    angles = model.places[..., None].to(x.dtype) * torch.arange(1, WIDTH + 1, device=x.device, dtype=x.dtype)
    return x * angles.cos() + torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1) * angles.sin()


def written(model: Model, x: Tensor) -> Tensor:
    """Parts of features written into a new tensor, as latent attention puts its heads together."""
    y = x.new_empty(x.shape)
    y[..., :3], y[..., 3:] = x[..., :3].relu(), x[..., 3:]
    return y


def shifted_in_place(model: Model, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return x + y


def leaked(model: Model, x: Tensor) -> Tensor:
    """What is written into something else comes back by another way."""
    y = x.new_zeros(x.shape[0], 1, WIDTH)
    y.copy_(x[:, :1])
    return x + y


def stale_view(model: Model, x: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    view = y.transpose(1, 2)
    y.copy_(x)
    return x + view.mean(-1)[:, None]


def written_before(model: Model, x: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    y[..., 3:] = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
    y[..., :3] = x[..., :3]
    return x + y


def repeated_no_more(model: Model, x: Tensor) -> Tensor:
    kind = model.kind(torch.zeros_like(model.tokens))
    kind += model.place(torch.arange(x.shape[1], device=x.device))
    return x + kind


def partly_constant(model: Model, x: Tensor) -> Tensor:
    y = x.new_zeros(1, x.shape[1], 1)
    y[:, 2:5] += 1
    return x + y


def chunked(model: Model, x: Tensor) -> Tensor:
    return (x.unflatten(1, (-1, 3)) + x.unflatten(1, (-1, 3)).mean(2, keepdim=True)).flatten(1, 2)


def windowed(model: Model, x: Tensor) -> Tensor:
    parts = x.unflatten(1, (-1, 3)).unflatten(-1, (HEADS, -1)).transpose(2, 3)
    return x + F.scaled_dot_product_attention(parts, parts, parts).transpose(2, 3).flatten(3).flatten(1, 2)


def crossed(model: Model, x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    few = heads[:, :, :4]
    return x + F.scaled_dot_product_attention(heads, few, few).transpose(1, 2).flatten(2)


def by_value(model: Model, x: Tensor) -> Tensor:
    return x * 2 if model.tokens.sum().item() % 2 else x


def by_list(model: Model, x: Tensor) -> Tensor:
    return x * max(model.tokens[0].tolist())


def counted(model: Model, x: Tensor) -> Tensor:
    return x + model.place(torch.arange(x.shape[1], device=x.device))


def scores(model: Model, x: Tensor) -> Tensor:
    return x + (x @ x.transpose(1, 2) / LENGTH) @ x


BY_TOKEN: Mapping[str, Step] = {
    "linear": lambda model, x: model.first(x),
    "gated": lambda model, x: F.silu(model.first(x)) * model.second(x),
    "norm": lambda model, x: model.norm(x),
    "root mean square": lambda model, x: F.rms_norm(x, (WIDTH,)),
    "by hand": lambda model, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
    "rotated": rotate,
    "places": lambda model, x: x + model.place(model.places),
    "kinds": lambda model, x: x + model.kind(torch.zeros_like(model.tokens)),
    "written": written,
    "first token for nothing": lambda model, x: (model.first(x[:, 0]), x)[1],
    "places of all samples": lambda model, x: (
        x + model.place.weight.index_select(0, model.places.reshape(-1)).view(x.shape)
    ),
    "softmax of features": lambda model, x: x.softmax(-1),
    "heads": lambda model, x: x.view(*x.shape[:2], HEADS, -1).transpose(1, 2).transpose(1, 2).flatten(2),
    "flat": lambda model, x: model.first(x.flatten(0, 1)).view(x.shape),
    "dropped": lambda model, x: F.dropout(x, 0.1, training=model.training),
    "halves": lambda model, x: torch.cat([half.relu() for half in x.chunk(2, -1)], -1),
    "beside kinds": lambda model, x: model.wide(torch.cat([x, model.kind(torch.zeros_like(model.tokens))], -1)),
    "constant": lambda model, x: x * torch.ones(x.shape[1], 1, device=x.device),
    "unused": lambda model, x: (x.cumsum(1), x)[1],
}
MIXING: Mapping[str, Step] = {
    "rolled": lambda model, x: x + x.roll(1, 1),
    "shifted": lambda model, x: x + torch.cat([x[:, :1], x[:, :-1]], 1),
    "in place": shifted_in_place,
    "leaked": leaked,
    "summed": lambda model, x: x.cumsum(1),
    "centred": lambda model, x: x - x.mean(1, keepdim=True),
    "largest": lambda model, x: x + x.amax(1, keepdim=True),
    "softmax of tokens": lambda model, x: x.softmax(1),
    "flipped": lambda model, x: x.flip(1),
    "sorted": lambda model, x: x.sort(1).values,
    "first": lambda model, x: x + x[:, 0:1],
    "picked": lambda model, x: x + x[:, 3][:, None],
    "by number": lambda model, x: x[:, torch.arange(LENGTH, device=x.device).flip(0)],
    "selected": lambda model, x: x + x.index_select(1, torch.arange(LENGTH, device=x.device).flip(0)),
    "first for something": lambda model, x: x + model.first(x[:, 0])[:, None],
    "views of views": lambda model, x: x + x.transpose(1, 2)[..., 0].unsqueeze(1).expand(x.shape),
    "read before it is changed": lambda model, x: x + [x[:, 0].clone(), x.relu_()][0][:, None],
    "gathered": lambda model, x: x.gather(1, model.tokens[..., None].expand(-1, -1, WIDTH) % LENGTH),
    "convolution": lambda model, x: model.convolution(x.transpose(1, 2)).transpose(1, 2),
    "recurrent": lambda model, x: model.recurrent(x)[0],
    "batch norm": lambda model, x: model.batch_norm(x.transpose(1, 2)).transpose(1, 2),
    "chunked": chunked,
    "windowed": windowed,
    "crossed": crossed,
    "by value": by_value,
    "by list": by_list,
    "counted": counted,
    "scores": scores,
    "across": lambda model, x: x + torch.einsum("blw,bmw->blw", x, x),
    "masked": lambda model, x: x * torch.ones(LENGTH, LENGTH, device=x.device).tril().sum(1)[:, None],
    "flat of one length": lambda model, x: model.first(x.flatten(0, 1)).view(-1, LENGTH, WIDTH),
    "by length": lambda model, x: x / x.shape[1],
    "by logarithm": lambda model, x: x * torch.tensor(float(x.shape[1])).log(),
    "from the end": lambda model, x: x + (x.shape[1] - model.places).to(x.dtype)[..., None],
    "if long": lambda model, x: x * 2 if x.shape[1] > 8 else x,
    "by a sum": lambda model, x: x / torch.ones(x.shape[1], device=x.device).sum(),
    "by counted places": lambda model, x: x / torch.arange(x.shape[1], device=x.device).sum(),
    "by shifted tokens": lambda model, x: x + model.token((model.tokens + x.shape[1]) % 32),
    "by scaled places": lambda model, x: x + model.place(model.places * 7 // x.shape[1]),
    "table of its own": lambda model, x: x + torch.arange(x.shape[1], device=x.device).cos()[model.places][..., None],
    "stale view": stale_view,
    "written before": written_before,
    "repeated no more": repeated_no_more,
    "partly constant": partly_constant,
    "by count": lambda model, x: x * (1 + int(model.tokens[model.tokens > 20].shape[0] > 2)),
    "strided": lambda model, x: x + x.reshape(x.shape[0], WIDTH, LENGTH).transpose(1, 2),
}


class Model(nn.Module):
    """Steps around one attention."""

    def __init__(self, before: list[Step], after: list[Step], causal: bool = True) -> None:
        super().__init__()
        self.before, self.after, self.causal = before, after, causal
        self.token, self.place, self.kind = nn.Embedding(32, WIDTH), nn.Embedding(LENGTH, WIDTH), nn.Embedding(2, WIDTH)
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.convolution, self.recurrent = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head, self.wide = nn.Linear(WIDTH, 32), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.tokens = tokens
        counted = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        self.places = counted if position_ids is None else position_ids
        x = self.token(tokens)
        for step in self.before:
            x = step(self, x)
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=self.causal).transpose(1, 2).flatten(2)
        for step in self.after:
            x = step(self, x)
        return self.head(x)


def found(module: nn.Module) -> SharedSequence | str:
    inputs = {"tokens": "tokens"}
    blueprint = Blueprint(
        module=module, inputs=inputs, loss=token_loss, initialise=None, vocabulary_size=32, sequence_length=LENGTH,
        example=token_example(LENGTH, inputs.values()),
    )  # fmt: skip
    return find_shared_sequence(blueprint)


class _Alone(TorchFunctionMode):
    """Attention in which a token sees itself alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return args[2] + args[0] * 0
        return func(*args, **(kwargs or {}))


def is_local(model: Model) -> bool:
    """Whether a part of the tokens, at their places, gives that part of the results, attention aside."""
    model = model.double().eval()
    mine = torch.tensor([0, 1, 2, 9, 10, 11])
    tokens = torch.randint(32, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), _Alone():
        try:
            whole = model(tokens)
            part = model(tokens[:, mine], mine.expand(3, -1))
        except (RuntimeError, IndexError):
            return False
    return torch.allclose(whole[:, mine], part)


@pytest.mark.parametrize("name", BY_TOKEN)
def test_what_works_token_by_token_is_shared(name: str) -> None:
    step = BY_TOKEN[name]
    assert found(Model([step], [step])) == SharedSequence("position_ids", "causal", ("",))


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_not(name: str) -> None:
    for model in (Model([MIXING[name]], []), Model([], [MIXING[name]]), Model([evaluated(MIXING[name])], [])):
        assert isinstance(found(model), str)


def evaluated(step: Step) -> Step:
    """A step of evaluations alone."""
    return lambda model, x: x if model.training else step(model, x)


@pytest.mark.parametrize("name", ["gated", "norm", "rotated", "places", "written"])
def test_what_works_token_by_token_in_evaluation_alone_is_shared(name: str) -> None:
    assert found(Model([evaluated(BY_TOKEN[name])], [])) == SharedSequence("position_ids", "causal", ("",))


@pytest.mark.parametrize("seed", range(6))
def test_drawn_models_are_shared_exactly_where_their_parts_are_parts_of_the_whole(seed: int) -> None:
    draw = Random(seed)
    for _ in range(5):
        steps = [draw.choice(list(BY_TOKEN.values())) for _ in range(draw.randint(1, 6))]
        mixes = draw.random() < 0.5
        if mixes:
            steps.insert(draw.randint(0, len(steps)), draw.choice(list(MIXING.values())))
        cut = draw.randint(0, len(steps))
        torch.manual_seed(seed)
        model = Model(steps[:cut], steps[cut:], causal=draw.random() < 0.5)
        shares = not isinstance(found(model), str)
        assert shares is not mixes
        assert is_local(model) or not shares


class PlacesFromOne(Model):
    """As RoBERTa's, which count from behind the padding unless places are given."""

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        counted = (tokens != 40).long().cumsum(1).clamp(max=LENGTH - 1)
        return super().forward(tokens, counted if position_ids is None else position_ids)


PADDING = 3


class BesidePadding(Model):
    """As RoBERTa's in full: the padding token stands at its own number, all others are counted from there on."""

    def __init__(self) -> None:
        super().__init__([BY_TOKEN["places"]], [], causal=False)
        self.place = nn.Embedding(LENGTH + PADDING + 1, WIDTH)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(tokens, self.counted(tokens) if position_ids is None else position_ids)

    def counted(self, tokens: Tensor) -> Tensor:
        mask = tokens.ne(PADDING).int()
        return (mask.cumsum(1).type_as(mask) * mask).long() + PADDING


class OneFurther(BesidePadding):
    def counted(self, tokens: Tensor) -> Tensor:
        return super().counted(tokens) + 1


class PaddingCounted(BesidePadding):
    def counted(self, tokens: Tensor) -> Tensor:
        return tokens.ne(PADDING).long().cumsum(1) + PADDING


class AtMost(BesidePadding):
    """A limit that no sample of this length reaches."""

    def counted(self, tokens: Tensor) -> Tensor:
        return super().counted(tokens).clamp(max=LENGTH + PADDING)


class HidesPadding(BesidePadding):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(tokens, position_ids) * tokens.ne(PADDING)[..., None]


class AllHidden(Model):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.token(tokens)[:, None]
        mask = torch.zeros(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=x.device)
        return self.head(F.scaled_dot_product_attention(x, x, x, mask)[:, 0])


class PartlyHidden(Model):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.token(tokens)[:, None]
        mask = x.new_zeros(1, 1, 1, tokens.shape[1])
        mask[..., 3:] -= 1e9
        return self.head(F.scaled_dot_product_attention(x, x, x, mask)[:, 0])


class Latents(Model):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x, latents = self.token(tokens)[:, None], self.place.weight[None, None, :6]
        fixed = F.scaled_dot_product_attention(latents, latents, latents).mean(2)
        return self.head(F.scaled_dot_product_attention(x, x, x)[:, 0] + fixed)


class Layered(Model):
    def __init__(self) -> None:
        super().__init__([], [])
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.layer(self.token(tokens)))


class WithoutPlaces(Model):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens)


class PlacesOnlyIfGiven(Model):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = super().forward(tokens, position_ids)
        return x if position_ids is None else x * position_ids[..., None].to(x.dtype).cos()


class Masked(Model):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.token(tokens)[:, None]
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril(3)
        return self.head(F.scaled_dot_product_attention(x, x, x, seen)[:, 0])


class Both(Model):
    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.token(tokens)[:, None]
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.head(F.scaled_dot_product_attention(x, x, x)[:, 0])


class MaskedByNothing(Model):
    """A mask that lets every token see every other says nothing."""

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.token(tokens)[:, None]
        mask = (1.0 - torch.ones_like(tokens, dtype=x.dtype))[:, None, None] * -1e9
        return self.head(F.scaled_dot_product_attention(x, x, x, mask)[:, 0])


def test_a_mask_of_one_number_is_none() -> None:
    assert found(MaskedByNothing([], [])) == SharedSequence("position_ids", "full", ("",))


def test_a_model_that_needs_no_places_is_given_none() -> None:
    assert found(WithoutPlaces([BY_TOKEN["gated"]], [])) == SharedSequence("", "causal", ("",))


def test_places_beside_padding_are_given_so() -> None:
    """What a forward does with the padding token whether it is given places or not is no reason against it."""
    assert found(BesidePadding()) == SharedSequence("position_ids", "full", ("",), padding_token=PADDING)
    assert found(HidesPadding()) == SharedSequence("position_ids", "full", ("",), padding_token=PADDING)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (OneFurther(), "where it is given position_ids, as its forward seems to count them"),
        (PaddingCounted(), "where it is given position_ids, as its forward seems to count them"),
        (AtMost(), "does more with the padding token than counting its position_ids beside it"),
        (WithoutPlaces([BY_TOKEN["places"]], []), "depends on how many tokens there are"),
        (PlacesOnlyIfGiven([], []), "it computes something else where it is given position_ids"),
        (Masked([], []), "gives attention a mask"),
        (PlacesFromOne([BY_TOKEN["places"]], []), "where it is given position_ids"),
        (AllHidden([], []), "gives attention a mask"),
        (PartlyHidden([], []), "gives attention a mask"),
        (Latents([], []), "between its tokens and between something else"),
        (Layered(), "layer.self_attn is an nn.MultiheadAttention"),
        (Both([], []), "some of its attention is causal, and some sees every token"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_why_a_model_is_not_shared(module: nn.Module, why: str) -> None:
    said = found(module)
    assert isinstance(said, str)
    assert why in said


def test_what_is_not_of_tokens_alone_is_not_shared() -> None:
    inputs = {"tokens": "tokens", "position_ids": "places"}
    blueprint = Blueprint(
        module=Model([], []), inputs=inputs, loss=token_loss, initialise=None, vocabulary_size=32,
        sequence_length=LENGTH, example=token_example(LENGTH, inputs.values()),
    )  # fmt: skip
    assert find_shared_sequence(blueprint) == "its forward also takes places, which nothing says how to share"
    assert "no sequences" in str(find_shared_sequence(replace(blueprint, inputs={"tokens": "images"})))
