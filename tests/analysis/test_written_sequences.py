"""Whether ranks may share the sequence of models that write their attention out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.analysis.tokens.find_sequence import SharedSequence, find_shared_sequence
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss

LENGTH, WIDTH, HEADS = 12, 8, 2
Attend = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Heads, and what is done with them."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.parts, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.child = Products()
        self.words = torch.zeros(1, 1, dtype=torch.int64)
        self.scale = nn.Parameter(torch.ones(1))
        self.biases = nn.Parameter(torch.zeros(16, 16))
        self.sinks = nn.Parameter(torch.zeros(HEADS, 2))
        self.of_tokens = nn.Linear(WIDTH // HEADS, 1)
        self.register_buffer("triangle", torch.ones(16, 16, dtype=torch.bool).tril())
        self.register_buffer("band", torch.ones(16, 16, dtype=torch.bool).tril().triu(-4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.parts(x).chunk(3, -1)
        )  # fmt: skip
        return x + self.out(self.attend(self, query, key, value).transpose(1, 2).flatten(2))


class Products(nn.Module):
    """A product in a module of its own."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right


class Model(nn.Module):
    def __init__(self, *attends: Attend) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(32, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Attention(attend) for attend in attends)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.words(tokens) + self.places(position_ids)
        for layer in self.layers:
            layer.words = tokens
            x = layer(x)
        return self.head(x)


def found(*attends: Attend) -> SharedSequence | str:
    inputs = {"tokens": "tokens"}
    blueprint = Blueprint(
        module=Model(*attends), inputs=inputs, loss=token_loss, initialise=None, vocabulary_size=32,
        sequence_length=LENGTH, example=token_example(LENGTH, inputs.values()),
    )  # fmt: skip
    return find_shared_sequence(blueprint, (6,))


def full(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return module.dropout((q @ k.mT * 0.5).softmax(-1)) @ v


def causal(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = module.triangle[: q.shape[2], : q.shape[2]]
    return (q @ k.mT).masked_fill(~seen, -1e9).softmax(-1) @ v


def causal_by_hand(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return torch.where(seen, q @ k.mT, -1e9).softmax(-1) @ v


def windowed(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = module.band[: q.shape[2], : q.shape[2]]
    return torch.where(seen, q @ k.mT, -1e9).softmax(-1) @ v


def in_one_dim(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    samples, heads, tokens, _ = q.shape
    q, k, v = (each.reshape(samples * heads, tokens, -1) for each in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(samples, heads, tokens, -1)
    probabilities = F.dropout(scores.softmax(-1), 0.0).view(samples * heads, tokens, tokens)
    return torch.bmm(probabilities, v).view(samples, heads, tokens, -1)


def called(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def capped(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = module.triangle[: q.shape[2], : q.shape[2]]
    return ((q @ k.mT / 5.0).tanh() * 5.0).masked_fill(~seen, -1e9).softmax(-1) @ v


def beside(scores: Tensor, sinks: Tensor) -> Tensor:
    """Probabilities of keys beside sinks."""
    both = torch.cat([scores, sinks.expand(*scores.shape[:-1], -1)], -1)
    return (both - both.max(-1, keepdim=True).values).softmax(-1)[..., : -sinks.shape[-1]]


def with_sinks(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = module.triangle[: q.shape[2], : q.shape[2]]
    return beside((q @ k.mT).masked_fill(~seen, -1e9), module.sinks[None, :, None]) @ v


SHARED: Mapping[str, tuple[tuple[Attend, ...], str]] = {
    "full": ((full, full), "full"),
    "causal": ((causal, causal), "causal"),
    "causal by hand": ((causal_by_hand, causal), "causal"),
    "windowed": ((causal, windowed), "causal"),
    "in one dim": ((in_one_dim, full), "full"),
    "one of them a call": ((called, causal), "causal"),
    "capped": ((capped, windowed), "causal"),
    "with sinks": ((with_sinks, capped), "causal"),
}


@pytest.mark.parametrize("name", SHARED)
def test_written_attention_is_shared(name: str) -> None:
    attends, kind = SHARED[name]
    assert found(*attends) == SharedSequence("position_ids", kind, ("layers.0", "layers.1"), writes=True)  # type: ignore[arg-type]


def slopes(module: Attention, q: Tensor) -> Tensor:
    return 2.0 ** -torch.arange(1.0, HEADS + 1, device=q.device)[:, None, None]


def by_places(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(q.shape[2], device=q.device)
    return (q @ k.mT + (places[None] - places[:, None]).to(q.dtype)).softmax(-1) @ v


def from_the_end(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Places that depend on how many there are."""
    tokens = q.shape[2]
    bias = (slopes(module, q) * torch.arange(1 - 16, 1, device=q.device))[..., 16 - tokens :]
    seen = module.triangle[:tokens, :tokens]
    return (q @ k.mT * 0.5 + bias).masked_fill(~seen, -1e9).softmax(-1) @ v


def by_start(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The product begins with it, samples and heads in one dim."""
    samples, heads, tokens, _ = q.shape
    bias = (slopes(module, q) * torch.arange(tokens, device=q.device)).repeat(samples, 1, 1)
    q, k, v = (each.reshape(samples * heads, tokens, -1) for each in (q, k, v))
    seen = module.triangle[:tokens, :tokens]
    scores = bias.to(q.dtype).baddbmm(q, k.mT, beta=1.0, alpha=0.5).view(samples, heads, tokens, tokens)
    probabilities = scores.masked_fill(~seen, -1e9).softmax(-1).view(samples * heads, tokens, tokens)
    return torch.bmm(probabilities, v).view(samples, heads, tokens, -1)


BIASED: Mapping[str, tuple[tuple[Attend, ...], str]] = {
    "by places": ((by_places, full), "full"),
    "from the end": ((from_the_end, causal), "causal"),
    "by start": ((by_start, from_the_end), "causal"),
}


@pytest.mark.parametrize("name", BIASED)
def test_what_is_added_by_places_alone_is_shared(name: str) -> None:
    attends, kind = BIASED[name]
    wanted = SharedSequence("position_ids", kind, ("layers.0", "layers.1"), writes=True, biased=True)  # type: ignore[arg-type]
    assert found(*attends) == wanted


def test_calls_alone_are_not_read() -> None:
    assert found(called, called) == SharedSequence("position_ids", "causal", ("layers.0", "layers.1"))


def biased(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + module.biases[: q.shape[2], : q.shape[2]]).softmax(-1) @ v


def by_keys(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + k.mean(-1)[:, :, None]).softmax(-1) @ v


def by_words(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of the words of the first sample, so that it is for all samples the same."""
    return (q @ k.mT + (module.words[:1] % 7).to(q.dtype)).softmax(-1) @ v


def by_their_sum(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + torch.arange(q.shape[2]) * module.words[:1].sum().float()).softmax(-1) @ v


def by_draws(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + torch.rand(HEADS, 1, q.shape[2])).softmax(-1) @ v


def far_apart(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is hidden is seen again at the end of a long sample."""
    seen = module.triangle[: q.shape[2], : q.shape[2]]
    return ((q @ k.mT).masked_fill(~seen, -1.01e4) + 1e3 * torch.arange(q.shape[2])).softmax(-1) @ v


def by_many(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + -1e8 * torch.arange(q.shape[2])).softmax(-1) @ v


def by_sample(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + torch.arange(1.0, 1 + q.shape[0])[:, None, None, None] * torch.arange(q.shape[2])).softmax(
        -1
    ) @ v


def window_of_half(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A window that only long samples show."""
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril().triu(-7)
    return torch.where(seen, q @ k.mT, -1e9).softmax(-1) @ v


def counted(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[2] ** -0.5).softmax(-1) @ v


def of_half(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries of tokens in another order."""
    return (q.flip(2) @ k.mT).softmax(-1) @ v


def of_features(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v @ (q.mT @ k).softmax(-1)


def linear(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT) @ v


def apart(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return module.child((q @ k.mT).softmax(-1), v)


def begun_apart(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return module.child(q, k.mT).softmax(-1) @ v


def learned_scale(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * module.scale).softmax(-1) @ v


def entropy(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    probabilities = (q @ k.mT).softmax(-1)
    return probabilities @ v * probabilities.max(-1, keepdim=True).values


def mean_of_values(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v - v.mean(2, keepdim=True)


def in_evaluation(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (causal if module.training else full)(module, q, k, v)


def unmasked_where_short(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (causal if q.shape[2] > 7 else full)(module, q, k, v)


def heads_first(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(0, 1).flatten(0, 1) for each in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).unflatten(0, (HEADS, -1)).transpose(0, 1)


def sinks_of_tokens(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return beside(q @ k.mT, module.of_tokens(q)) @ v


def sinks_of_all_tokens(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return beside(q @ k.mT, module.sinks[None, :, None] * q.mean((0, 2, 3))[:, None, None]) @ v


def sinks_of_first(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return beside(q @ k.mT, module.of_tokens(q)[:1, :, :1]) @ v


def counted_sinks(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return beside(q @ k.mT, module.sinks[None, :, None] * torch.arange(q.shape[2]).max()) @ v


def learned_cap(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).tanh() * module.scale).softmax(-1) @ v


def counted_cap(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).tanh() * q.shape[2]).softmax(-1) @ v


REFUSED: Mapping[str, tuple[tuple[Attend, ...], str]] = {
    "biased": ((full, biased), "layers.1 writes its attention out, and adds to its scores something that is no mask"),
    "by keys": ((by_keys,), "adds to its scores something that is no mask"),
    "by words": ((by_words,), "adds to its scores what it has computed of them"),
    "by their sum": ((by_their_sum,), "reduces over it"),
    "by draws": ((by_draws,), "adds to its scores something that is no mask"),
    "far apart": ((far_apart,), "hides scores by -10100.0, and adds up to 11000.0 more to some of them"),
    "by many": ((by_many,), "too large for a bias"),
    "by sample": ((by_sample,), "adds to its scores something that differs between samples"),
    "window of half": ((window_of_half,), "depends on how many tokens"),
    "counted": ((counted,), "depends on how many tokens"),
    "flipped": ((of_half,), "flip"),
    "of features": ((of_features,), "none of its attention of its tokens is a call"),
    "linear": ((linear,), "scores of which there was no softmax"),
    "apart": ((apart,), "layers.0.child writes its attention out, and attends by scores that layers.0 made"),
    "begun apart": ((begun_apart,), "attends by scores that layers.0.child made"),
    "learned scale": ((learned_scale,), "softmax"),
    "entropy": ((entropy,), "takes the greatest of something else than its scores"),
    "sinks of tokens": ((sinks_of_tokens,), "differs between samples or tokens"),
    "sinks of all tokens": ((sinks_of_all_tokens,), "reduces over it"),
    "sinks of the first token": ((sinks_of_first,), "takes"),
    "counted sinks": ((counted_sinks,), "depends on how many tokens"),
    "cap that is learnt": ((learned_cap,), "softmax of something else"),
    "counted cap": ((counted_cap,), "depends on how many tokens"),
    "mean of values": ((mean_of_values,), "reduces over it"),
    "mixed kinds": ((full, causal), "some of its attention is causal, and some sees every token"),
    "in evaluation": ((in_evaluation,), "in evaluation"),
    "unmasked where short": ((unmasked_where_short,), "depends on how many"),
    "heads first": ((heads_first,), "nothing shows which is which"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_would_not_compute_alike_is_refused(name: str) -> None:
    attends, why = REFUSED[name]
    answer = found(*attends)
    assert isinstance(answer, str), answer
    assert why in answer
