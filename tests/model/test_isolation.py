"""Documents that are isolated do not see one another, in any family of transformers, or they are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kit import real

from weft.config.recipe import ModelRecipe
from weft.errors import RecipeError
from weft.model.hf import build_hf

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_dim": 64,
    "intermediate_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4,
    "max_position_embeddings": 64, "state_size": 8, "word_embed_proj_dim": 32, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
APART = ("gemma2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "phi3", "qwen2_moe", "stablelm")
TOGETHER = ("bloom", "mamba", "opt")
"""Attention or positions of their own, or a state that goes on."""
BY_RELEASE = ("falcon", "gptj")
"""Attention of their own until transformers 5.23, and the common one in some later release."""


def written(folder: Path, family: str, **more: Any) -> ModelRecipe:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = CONFIG_MAPPING[family]()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    sizes = {name: value for name, value in (SIZES | more).items() if hasattr(known, name)}
    config = {"model_type": family, "architectures": [names[family]], "vocab_size": 96, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return ModelRecipe(hf=str(folder), sequence_length=32)


@pytest.mark.parametrize("family", APART)
def test_a_document_behind_another_is_as_if_alone(family: str, tmp_path: Path) -> None:
    """Of the model that is trained, with drawn borders: its outputs know nothing of the document before."""
    draw, blueprint = random.Random(family), build_hf(written(tmp_path, family), isolated_documents=True)
    model = real(blueprint, torch.float32).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    first, second = draw.randint(1, 9), draw.randint(2, 9)
    tokens = torch.randint(3, 96, (2, first + second))
    other = torch.cat([torch.randint(3, 96, (2, first)), tokens[:, first:]], 1)
    positions = torch.cat([torch.arange(first), torch.arange(second)]).expand(2, -1)
    seen, changed = (model(input_ids=each, position_ids=positions).logits[:, first:] for each in (tokens, other))
    assert torch.allclose(seen, changed, rtol=1e-4, atol=1e-4 * float(seen.detach().abs().max()))


@pytest.mark.parametrize("family", TOGETHER)
def test_a_model_that_mixes_documents_is_refused(family: str, tmp_path: Path) -> None:
    recipe = written(tmp_path, family)
    build_hf(recipe)
    with pytest.raises(RecipeError, match=rf'a {family} does not keep documents apart.*Use documents = "packed"'):
        build_hf(recipe, isolated_documents=True)


@pytest.mark.parametrize("family", BY_RELEASE)
def test_what_depends_on_the_release_is_refused_or_keeps_documents_apart(family: str, tmp_path: Path) -> None:
    reason = ""
    try:
        build_hf(written(tmp_path, family), isolated_documents=True)
    except RecipeError as refused:
        reason = str(refused)
    if not reason:
        test_a_document_behind_another_is_as_if_alone(family, tmp_path)
    assert not reason or f"a {family} does not keep documents apart" in reason


def test_attention_that_is_not_weft_s_is_said(tmp_path: Path) -> None:
    (note,) = [note for note in build_hf(written(tmp_path, "falcon")).notes if "attention" in note]
    assert note.startswith("a falcon takes no attention but its own: it runs with that of transformers (")
    assert not [note for note in build_hf(written(tmp_path, "llama")).notes if "attention" in note]
