"""Whether ranks may share the sequence of models by the attention that they call, or write out by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.analysis.tokens.find_sequence import SharedSequence, find_shared_sequence
from weft.model.attention.call import MaskPattern, ScoreMod, attend
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss

LENGTH, WIDTH, HEADS = 12, 8, 2
CAUSAL = MaskPattern(causal=True)
Attend = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Heads, and what is done with them."""

    def __init__(self, attention: Attend) -> None:
        super().__init__()
        self.attention = attention
        self.parts, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.by_head, self.of_tokens = nn.Parameter(torch.zeros(HEADS)), nn.Linear(WIDTH // HEADS, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.parts(x).chunk(3, -1)
        )  # fmt: skip
        return x + self.out(self.attention(self, query, key, value).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, *attentions: Attend) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(32, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Attention(one) for one in attentions)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.words(tokens) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def found(*attentions: Attend) -> SharedSequence | str:
    inputs = {"tokens": "tokens"}
    blueprint = Blueprint(
        module=Model(*attentions), inputs=inputs, loss=token_loss, initialise=None, vocabulary_size=32,
        sequence_length=LENGTH, example=token_example(LENGTH, inputs.values()),
    )  # fmt: skip
    return find_shared_sequence(blueprint, (6,))


def fused(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def full(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, MaskPattern(), dropout=module.dropout)


def windowed(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, MaskPattern(causal=True, window=4))


def modified(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, CAUSAL, ScoreMod(softcap=5.0, slopes=module.by_head, sinks=module.by_head))


def written(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def unbounded_in_evaluation(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (windowed if module.training else fused)(module, q, k, v)


SHARED: Mapping[str, tuple[tuple[Attend, ...], str]] = {
    "called": ((fused, fused), "causal"),
    "dropping": ((full, full), "full"),
    "windowed": ((fused, windowed), "causal"),
    "another window in evaluation": ((unbounded_in_evaluation, fused), "causal"),
    "modified": ((windowed, modified), "causal"),
}


@pytest.mark.parametrize("name", SHARED)
def test_calls_of_attention_are_shared(name: str) -> None:
    attentions, kind = SHARED[name]
    wanted = SharedSequence("position_ids", kind, ("layers.0", "layers.1"), modified="modified" in name)  # type: ignore[arg-type]
    assert found(*attentions) == wanted


def sinks_of_tokens(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, CAUSAL, ScoreMod(sinks=module.of_tokens(q).mean((0, 2, 3))))


def counted_sinks(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, CAUSAL, ScoreMod(sinks=module.by_head * torch.arange(q.shape[2], device=q.device).max()))


def counted_slopes(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, CAUSAL, ScoreMod(slopes=module.by_head * torch.arange(q.shape[2], device=q.device).max()))


def counted_cap(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, CAUSAL, ScoreMod(softcap=float(q.shape[2])))


def counted_window(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, MaskPattern(causal=True, window=max(2, q.shape[2] // 2)))


def masked(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return attend(q, k, v, CAUSAL, mask=seen[None, None])


def in_evaluation(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (fused if module.training else full)(module, q, k, v)


REFUSED: Mapping[str, tuple[tuple[Attend, ...], str]] = {
    "written out": ((written, written), "ranks share what calls scaled_dot_product_attention"),
    "one of them written out": ((full, written), "its tokens meet outside of attention: layers.1"),
    "mixed kinds": ((fused, full), "some of its attention is causal, and some sees every token"),
    "sinks of tokens": ((sinks_of_tokens,), "reduces over it"),
    "counted sinks": ((counted_sinks,), "depends on how many tokens"),
    "counted slopes": ((counted_slopes,), "depends on how many tokens"),
    "counted cap": ((counted_cap,), "depends on how many tokens"),
    "counted window": ((counted_window,), "depends on how many tokens"),
    "masked": ((masked,), "gives attention a mask"),
    "in evaluation": ((in_evaluation,), "in evaluation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_would_not_compute_alike_is_refused(name: str) -> None:
    attentions, why = REFUSED[name]
    answer = found(*attentions)
    assert isinstance(answer, str), answer
    assert why in answer
