"""Known models have as many parameters as their authors say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft.errors import RecipeError
from weft.model.profile import profile_of_sizes
from weft.model.profile.known import KNOWN_MODELS, known_model

ROUNDED = 0.035
"""Published to two or three digits, and with or without embeddings."""


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_parameters(name: str) -> None:
    known = KNOWN_MODELS[name]
    profile = profile_of_sizes(known.sizes)
    is_round = known.parameters % 1_000_000 == 0
    assert profile.num_parameters == pytest.approx(known.parameters, rel=ROUNDED if is_round else 0)
    assert len(profile.blocks) == known.sizes.num_layers
    assert profile.name == name


@pytest.mark.parametrize("given", ["llama-3.1-405b", "Llama-3.1-405B", "llama_3.1_405b"])
def test_lookup_forgives_spelling(given: str) -> None:
    assert known_model(given) is KNOWN_MODELS["llama-3.1-405b"]


def test_lookup_suggests() -> None:
    with pytest.raises(RecipeError, match=r'model "lama-3.1-405b" is not .* Did you mean llama-3\.1-405b\?'):
        known_model("lama-3.1-405b")
    with pytest.raises(RecipeError, match=r"The known ones are: gpt2, "):
        known_model("zzz")


def test_mixtures_say_what_is_routed() -> None:
    profile = profile_of_sizes(known_model("deepseek-v3").sizes)
    dense, mixture = profile.blocks[0], profile.blocks[3]
    assert [block is mixture for block in profile.blocks] == [False] * 3 + [True] * 58
    assert dense.expert_parameters == 0
    assert mixture.expert_parameters == 256 * 3 * 7168 * 2048
    active = profile.num_parameters - 58 * mixture.expert_parameters * (256 - 8) // 256
    assert active == pytest.approx(37e9, rel=0.03)  # DeepSeek-AI 2024, arXiv 2412.19437: 37 billion activated
    assert profile.num_experts == 256
    assert dict(profile.divisible)["num_heads"] == 128


def test_import_is_light() -> None:
    code = "import sys, weft.model.profile; print({'torch', 'numpy'} & set(sys.modules) or 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "none"
