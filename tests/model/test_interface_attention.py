"""Models of `transformers` whose attention Weft takes, beside the library's own attention of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from weft.config.recipe import BatchRecipe, ModelRecipe, Recipe, RunRecipe
from weft.model.attention.hf_modules import alibi_slopes
from weft.model.build import build_model

_GROUPED: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "max_position_embeddings": 64,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "gemma2": {**_GROUPED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 2},
    "gpt_oss": {
        **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_dropout": 0.0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "bloom": {"hidden_size": 24, "n_layer": 2, "n_head": 6},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64},
}  # fmt: skip
"""Six heads of BLOOM: slopes of a power of two, and some between them."""


def models(kind: str, folder: Path) -> tuple[Any, Any]:
    """The library's, and Weft's with the same weights, in evaluation."""
    config = AutoConfig.for_model(kind, vocab_size=64, **SMALL[kind])
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    theirs.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [type(theirs).__name__]}))
    recipe = Recipe(
        model=ModelRecipe(hf=str(folder), sequence_length=12),
        batch=BatchRecipe(global_batch_size=1),
        run=RunRecipe(steps=1),
    )
    config = build_model(recipe).module.config
    assert config._attn_implementation == "weft_masked"
    ours = build_model(recipe).module
    ours.to_empty(device="cpu")
    ours.load_state_dict(theirs.state_dict())
    for name, buffer in theirs.named_buffers():  # such as no state holds
        ours.get_buffer(name).copy_(buffer)
    return theirs, ours.eval()


@pytest.mark.parametrize("kind", SMALL)
def test_it_computes_what_the_library_writes_out(kind: str, tmp_path: Path) -> None:
    theirs, ours = models(kind, tmp_path)
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(5))
    padding = torch.ones_like(tokens)
    padding[0, :4] = 0
    for mask in (None, padding):
        wanted, found = (
            model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.detach() for model in (theirs, ours)
        )
        seen: Tensor = torch.ones_like(tokens).bool() if mask is None else mask.bool()
        torch.testing.assert_close(found[seen], wanted[seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["bloom", "xglm"])
def test_it_generates_with_a_cache(kind: str, tmp_path: Path) -> None:
    theirs, ours = models(kind, tmp_path)
    tokens = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(6))
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    one, other = (model.generate(tokens, **how) for model in (theirs, ours))
    assert torch.equal(one, other)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20, 112])
def test_slopes_are_those_of_the_library(heads: int) -> None:
    cpu = torch.device("cpu")
    torch.testing.assert_close(alibi_slopes(heads, cpu), _get_alibi_slopes(heads, cpu))
