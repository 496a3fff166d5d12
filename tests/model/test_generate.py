"""Sampling is deterministic, stops, and sees no more than the model can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_kit import build_family, real

from weft.errors import RecipeError
from weft.model.blueprint import logits_of
from weft.model.reference.generate import generate, next_tokens

PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture(scope="module", params=["decoder", "llama", "gpt2"])
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = real(build_family(request.param, tmp_path_factory.mktemp(request.param)), torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(8)  # far from uniform
    return made


def test_samples_repeat_with_their_seed(module: Any) -> None:
    state = torch.get_rng_state()
    settings = {"max_new_tokens": 8, "temperature": 0.8, "top_k": 20, "top_p": 0.95}
    first, again, other = (generate(module, PROMPT, seed=seed, **settings) for seed in (1, 1, 2))
    assert first.shape == (2, 11)
    assert torch.equal(first[:, :3], PROMPT)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training


def test_temperature_zero_takes_the_likeliest(module: Any) -> None:
    tokens = generate(module, PROMPT, max_new_tokens=4, temperature=0)
    logits = logits_of(module.eval()(tokens[:, :-1]))
    module.train()
    assert torch.equal(logits[:, 2:].argmax(-1), tokens[:, 3:])


def test_stop_ends_a_sample(module: Any) -> None:
    free = generate(module, PROMPT[:1], max_new_tokens=6, temperature=0)
    stop = int(free[0, 4])
    stopped = generate(module, PROMPT[:1], max_new_tokens=6, temperature=0, stop=stop)
    length = free[0, 3:].tolist().index(stop) + 4
    assert torch.equal(stopped, free[:, :length])


def test_the_window_slides_over_long_texts(module: Any) -> None:
    window = 16 if hasattr(module, "config") else 12
    tokens = generate(module, PROMPT, max_new_tokens=20, temperature=0)
    assert tokens.shape == (2, 23)
    last = logits_of(module.eval()(tokens[:, -window - 1 : -1]))[:, -1].argmax(-1)
    module.train()
    assert torch.equal(last, tokens[:, -1])


def test_nucleus_and_top_k_keep_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(2000, -1)
    generator = torch.Generator().manual_seed(0)
    assert set(next_tokens(logits, 1.0, None, 0.6, generator).tolist()) == {0, 1}
    assert set(next_tokens(logits, 1.0, 3, None, generator).tolist()) == {0, 1, 2}
    assert set(next_tokens(logits, 1.0, None, 0.01, generator).tolist()) == {0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        generate(torch.nn.Identity(), PROMPT, **({"max_new_tokens": 1} | settings))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"at least one token, not \(1, 0\)"):
        generate(torch.nn.Identity(), torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=1)
