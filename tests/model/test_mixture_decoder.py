"""Decoders of mixtures: what a recipe may say of them, their profile, and what `transformers` makes of an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kit import real

from weft.analysis.describe import describe
from weft.config.recipe import DecoderShape
from weft.errors import RecipeError
from weft.model.build import build_reference
from weft.model.description import description_of_shape, shrink_shape

SIZES: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 48, "vocabulary_size": 64,
    "sequence_length": 12, "num_experts": 6, "top_k": 2, "expert_ffn_size": 20,
}  # fmt: skip


def shape(**changes: Any) -> DecoderShape:
    return DecoderShape(**(SIZES | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "top_k = 3 means nothing without num_experts"),
        ({"top_k": 7}, "top_k = 7 is more than num_experts = 6"),
        ({"first_dense_layers": 3}, "leaves no block for a mixture. Use 2 or less"),
        ({"balance_rate": -1.0}, "balance_rate"),
    ],
)
def test_what_makes_no_mixture_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(RecipeError, match=message):
        shape(**({"top_k": 3, "expert_ffn_size": None} | changes))


@pytest.mark.parametrize("changes", [{}, {"shared_experts": 2, "first_dense_layers": 1, "router": "sigmoid"}])
def test_the_profile_is_that_of_the_model(changes: dict[str, Any]):
    """Parameters and operations, block by block, by numbers and by a forward that is looked at."""
    known, blueprint = description_of_shape(shape(**changes)).profile, build_reference(shape(**changes))
    found = describe(blueprint)
    assert known.num_parameters == sum(p.numel() for p in {*blueprint.module.parameters()})
    assert (known.num_experts, found.num_experts) == (6, 6)
    for index, (ours, theirs) in enumerate(zip(known.blocks, found.blocks, strict=True)):
        own = sum(parameter.numel() for parameter in blueprint.module.get_submodule(f"blocks.{index}").parameters())
        assert ours.parameters == theirs.parameters == own
        assert ours.expert_parameters == theirs.expert_parameters
        assert ours.forward_flops(12) == pytest.approx(theirs.forward_flops(12), rel=1e-9)


def test_a_small_form_still_chooses():
    small = shrink_shape(
        shape(num_experts=64, top_k=6, hidden_size=512, num_heads=8, expert_ffn_size=96, first_dense_layers=2), 2, 1, 2
    )
    assert isinstance(small, DecoderShape)
    assert (small.num_experts, small.top_k, small.first_dense_layers) == (4, 2, 1)
    assert small.expert_ffn_size is not None
    assert small.expert_ffn_size % 2 == 0


def test_an_export_is_mixtral_of_transformers(tmp_path: Path):
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    blueprint = build_reference(shape(tie_embeddings=False))
    model = real(blueprint, torch.float32)
    assert blueprint.export is not None
    assert blueprint.export_config is not None
    save_file(blueprint.export(dict(model.state_dict())), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(dict(blueprint.export_config)))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"router": "sigmoid"}, {"shared_experts": 1}, {"normalise": False}])
def test_what_transformers_has_not_is_exported_under_its_own_names(changes: dict[str, Any]):
    blueprint = build_reference(shape(**changes))
    assert (blueprint.export, blueprint.export_config) == (None, None)
