"""The configuration that DeepSpeed and Accelerate are given builds the same model."""

from __future__ import annotations

import json

import pytest
import torch

from weft.interop.systems._hugging_face import hugging_face_config
from weft.model.profile import profile_of_sizes
from weft.model.profile.known import known_model

MODELS = (
    "gpt2", "opt-125m", "bloom-560m", "pythia-6.9b", "llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b",
    "gemma-2b", "gemma-2-2b", "nemotron-4-15b", "mixtral-8x7b", "qwen3-30b-a3b",
)  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_the_built_model_has_the_same_parameters(model: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = known_model(model).sizes
    config = dict(json.loads(json.dumps(hugging_face_config(sizes))))
    read = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(read)
    assert sum(weight.numel() for weight in built.parameters()) == profile_of_sizes(sizes).num_parameters
    if sizes.rotary:
        assert read.rope_parameters["rope_theta"] == sizes.rotary_base
    drops = {module.p for module in built.modules() if isinstance(module, torch.nn.Dropout)}
    assert drops <= {sizes.dropout, sizes.attention_dropout}
