"""Grouped-query attention that a model writes out: keys and values are read as they were before heads were repeated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.llama.modeling_llama import repeat_kv

from weft.model.attention.written import AttentionReader

SAMPLES, HEADS, FEW, TOKENS, SIZE = 2, 6, 2, 5, 4
Repeat = Callable[[Tensor], Tensor]
GROUPS = HEADS // FEW


def added_to(keys: Tensor) -> Tensor:
    made = repeat_kv(keys, GROUPS)
    made += 1.0
    return made


REPEATS: Mapping[str, Repeat] = {
    "expanded": lambda x: repeat_kv(x, GROUPS),
    "flattened": lambda x: x.unsqueeze(2).expand(-1, -1, GROUPS, -1, -1).reshape(SAMPLES, HEADS, TOKENS, -1),
    "interleaved": lambda x: torch.repeat_interleave(x, repeats=GROUPS, dim=1),
    "method": lambda x: x.repeat_interleave(GROUPS, 1),
}


def hooked(keys: Tensor) -> Tensor:
    made = repeat_kv(keys, GROUPS)
    made.register_hook(lambda gradient: gradient * 0.5)
    return made


class Reversed(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -gradients[0]


def stopped(keys: Tensor) -> Tensor:
    with torch.no_grad():
        return repeat_kv(keys, GROUPS)


OTHERS: Mapping[str, Repeat] = {
    "with a hook": hooked,
    "reversed": lambda x: Reversed.apply(repeat_kv(x, GROUPS)),
    "one head after the other": lambda x: x.repeat(1, GROUPS, 1, 1),
    "changed": added_to,
    "of its own": lambda x: torch.cat([x, x + 1, x - 1], 1),
}
TURNS: Mapping[str, Repeat] = {
    "transpose": lambda k: k.transpose(2, 3),
    "mT": lambda k: k.mT,
    "permute": lambda k: k.permute(0, 1, 3, 2),
}


class Heads(TorchFunctionMode):
    """Notes how many heads keys and values have where attention is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.found.append((args[1].shape[1], args[2].shape[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("which", ["key", "value"])
def test_gradients_that_are_stopped_stay_so(which: str) -> None:
    query, key, value = drawn()
    with Heads() as watch, AttentionReader(TOKENS, causal=False, refused=lambda place, what: RuntimeError(what)):
        repeats = [stopped if name == which else REPEATS["expanded"] for name in ("key", "value")]
        made = attend(query, repeats[0](key), repeats[1](value))
    assert watch.found == [(HEADS, HEADS)]
    gradients = torch.autograd.grad(made.sum(), (query, key, value), allow_unused=True)
    assert (gradients[1] is None) == (which == "key")
    assert (gradients[2] is None) == (which == "value")


@pytest.mark.parametrize("turn", ["no gradients", "a hook"])
def test_keys_that_are_turned_otherwise_are_read_as_they_are(turn: str) -> None:
    def other(keys: Tensor) -> Tensor:
        with torch.set_grad_enabled(turn != "no gradients"):
            made = keys.mT
        if turn == "a hook":
            made.register_hook(lambda gradient: gradient * 0.5)
        return made

    query, key, value = drawn()
    with Heads() as watch, AttentionReader(TOKENS, causal=False, refused=lambda place, what: RuntimeError(what)):
        made = attend(query, repeat_kv(key, GROUPS), repeat_kv(value, GROUPS), other)
    wanted = attend(query, repeat_kv(key, GROUPS), repeat_kv(value, GROUPS), other)
    assert watch.found == [(HEADS, HEADS)]
    (mine,), (theirs,) = (torch.autograd.grad(each.sum(), query) for each in (made, wanted))
    assert torch.allclose(mine, theirs)


def test_an_expansion_of_more_is_no_repetition_of_heads() -> None:
    query, key, _ = drawn()
    value = torch.ones(SAMPLES, FEW, TOKENS, 1, dtype=torch.float64)
    with Heads() as watch, AttentionReader(TOKENS, causal=False, refused=lambda place, what: RuntimeError(what)):
        wide = value.unsqueeze(2).expand(-1, -1, GROUPS, -1, SIZE).reshape(SAMPLES, HEADS, TOKENS, SIZE)
        made = attend(query, repeat_kv(key, GROUPS), wide)
    assert watch.found == [(HEADS, HEADS)]
    assert torch.allclose(made, torch.ones_like(made))


def test_nothing_is_kept_alive() -> None:
    query, *_ = drawn()
    with AttentionReader(TOKENS, causal=False, refused=lambda place, what: RuntimeError(what)):
        kept: list[weakref.ref[Tensor]] = []
        for _ in range(2):
            key = torch.randn(SAMPLES, 1, TOKENS, SIZE, dtype=torch.float64)
            kept.append(weakref.ref(key))
            attend(query, repeat_kv(key, HEADS), repeat_kv(key, HEADS))
            del key
    assert [ref() for ref in kept] == [None, None]


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        return torch.randn(SAMPLES, heads, TOKENS, SIZE, generator=generator, dtype=torch.float64).requires_grad_()

    return draw(HEADS), draw(FEW), draw(FEW)


def attend(query: Tensor, key: Tensor, value: Tensor, turn: Repeat = TURNS["mT"]) -> Tensor:
    return torch.matmul((torch.matmul(query, turn(key)) * 0.5).softmax(-1), value)


def heads_of(key: Repeat, value: Repeat, turn: Repeat = TURNS["mT"]) -> tuple[int, int]:
    """Heads of keys and values that are read; results and gradients are those of what is written."""
    found: list[tuple[Tensor, ...]] = []
    watch = Heads()
    for reader in (None, AttentionReader(TOKENS, causal=False, refused=lambda place, what: RuntimeError(what))):
        given = drawn()
        if reader is None:
            made = attend(given[0], key(given[1]), value(given[2]), turn)
        else:
            with watch, reader:
                made = attend(given[0], key(given[1]), value(given[2]), turn)
        weights = torch.linspace(-1, 1, made.numel(), dtype=made.dtype).view(made.shape)
        found.append((made.detach(), *torch.autograd.grad((made * weights).sum(), given)))
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)
    (heads,) = watch.found
    return heads


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("name", REPEATS)
def test_repeated_heads_are_read_once(name: str, turn: str) -> None:
    assert heads_of(REPEATS[name], REPEATS[name], TURNS[turn]) == (FEW, FEW)


@pytest.mark.parametrize("name", OTHERS)
def test_other_heads_are_read_as_they_are(name: str) -> None:
    assert heads_of(OTHERS[name], OTHERS[name]) == (HEADS, HEADS)
    assert heads_of(OTHERS[name], REPEATS["expanded"]) == (HEADS, HEADS)
    assert heads_of(REPEATS["expanded"], OTHERS[name]) == (HEADS, HEADS)


def test_a_source_that_changes_is_no_source() -> None:
    query, key, value = (each.detach() for each in drawn())
    watch = Heads()
    with watch, AttentionReader(TOKENS, causal=False, refused=lambda place, what: RuntimeError(what)):
        keys, values = repeat_kv(key, GROUPS), repeat_kv(value, GROUPS)
        wanted = F.scaled_dot_product_attention(query, keys.clone(), values, scale=0.5)
        key.zero_()
        found = attend(query, keys, values)
    assert watch.found[-1] == (HEADS, HEADS)
    assert torch.allclose(found, wanted)


@pytest.mark.parametrize(("mode", "heads"), [(torch.no_grad, FEW), (torch.inference_mode, HEADS)])
def test_without_gradients(mode: Any, heads: int) -> None:
    """Of tensors made for inference nobody knows whether they have changed."""
    with mode():
        query, key, value = (each.detach() for each in drawn())
        watch = Heads()
        with watch, AttentionReader(TOKENS, causal=False, refused=lambda place, what: RuntimeError(what)):
            found = attend(query, repeat_kv(key, GROUPS), repeat_kv(value, GROUPS))
        assert torch.allclose(found, attend(query, repeat_kv(key, GROUPS), repeat_kv(value, GROUPS)))
    assert watch.found == [(heads, heads)]
