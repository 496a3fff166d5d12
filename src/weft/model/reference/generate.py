"""Sampling from a trained language model."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import RecipeError
from weft.model.blueprint import logits_of


@torch.no_grad()
def generate(
    module: nn.Module,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    window: int | None = None,
) -> Tensor:
    """Continue `tokens` (batch, length) and return prompt and continuation (batch, length + new).

    A `temperature` of 0 takes the likeliest token.  A sample that produced `stop` repeats it to the end; when all have,
    the result ends early.  The module must be whole; it runs in evaluation mode and is put back.  Hugging Face models
    use their own `generate` as far as their positions reach; else a model sees the last tokens that fit it, uncached.
    `window` says how many fit a model that does not say so itself.

    Raises:
        RecipeError: an empty prompt, or a setting out of range.
    """
    _check(tokens, max_new_tokens, temperature, top_k, top_p)
    training = module.training
    module.eval()
    try:
        if hasattr(module, "generate") and tokens.shape[1] + max_new_tokens <= _window(module, window):
            return _generate_hf(module, tokens, max_new_tokens, temperature, top_k, top_p, seed, stop)
        generator = torch.Generator(tokens.device).manual_seed(seed)
        return _generate_plain(
            module, tokens, max_new_tokens, temperature, top_k, top_p, generator, stop, _window(module, window)
        )
    finally:
        module.train(training)


def _check(tokens: Tensor, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise RecipeError(
            f"generate needs a prompt of shape (batch, length) with at least one token, not {tuple(tokens.shape)}."
        )
    ranges = (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "1 or more"),
        ("temperature", temperature, temperature >= 0, "0 (the likeliest token) or more"),
        ("top_k", top_k, top_k is None or top_k >= 1, "1 or more"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0, up to 1"),
    )
    for name, value, fits, allowed in ranges:
        if not fits:
            raise RecipeError(f"generate: {name} = {value} is out of range. Use {allowed}.")


def _window(module: Any, otherwise: int | None) -> int:
    """Tokens that the model can see at once; `otherwise` where it does not say so."""
    config = getattr(module, "config", None)
    length = getattr(module, "sequence_length", None) or getattr(config, "max_position_embeddings", None)
    return length or otherwise or sys.maxsize


def _generate_plain(
    module: nn.Module,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
    stop: int | None,
    window: int,
) -> Tensor:
    stopped = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        logits: Tensor = logits_of(module(tokens[:, max(0, tokens.shape[1] - window) :]))[:, -1].float()
        chosen = next_tokens(logits, temperature, top_k, top_p, generator)
        if stop is not None:
            chosen = chosen.masked_fill(stopped, stop)
            stopped |= chosen == stop
        tokens = torch.cat((tokens, chosen[:, None]), 1)
        if stop is not None and bool(stopped.all()):
            break
    return tokens


def next_tokens(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """Choose one token per row of `logits` (batch, vocabulary)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p is not None:
        logits = _nucleus(logits, top_p)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens whose probabilities just reach `top_p`.  Source: https://arxiv.org/abs/1904.09751."""
    ordered, order = logits.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return logits.masked_fill((before >= top_p).scatter(-1, order, before >= top_p), -torch.inf)


def _generate_hf(
    module: Any,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    stop: int | None,
) -> Tensor:
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
    with _seeded(seed, tokens.device):
        return module.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            eos_token_id=stop,
            pad_token_id=0 if stop is None else stop,
            **sampling,
        )


@contextmanager
def _seeded(seed: int, device: torch.device) -> Generator[None]:
    """Seed the default generators, which is all that transformers reads, and put their states back."""
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield
