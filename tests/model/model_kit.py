"""Small models of every family, layouts made by hand, and stages by substitution, for the tests of this room."""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.recipe import ConvNetShape, DecoderShape, EncoderShape, MlpShape, ModelRecipe
from weft.model.blueprint import Blueprint
from weft.model.build import build_reference
from weft.model.hf import build_hf
from weft.techniques.core import ModelLayout, ParameterLayout, Split
from weft.techniques.core.materialise import materialise

CPU = torch.device("cpu")
REFERENCES: dict[str, Any] = {
    "decoder": DecoderShape(
        num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=4, ffn_size=64, vocabulary_size=64, sequence_length=12
    ),
    "decoder-untied": DecoderShape(
        num_layers=3, hidden_size=32, num_heads=8, num_kv_heads=4, vocabulary_size=64, sequence_length=12,
        tie_embeddings=False,
    ),
    "encoder": EncoderShape(num_layers=3, hidden_size=32, num_heads=4, vocabulary_size=64, sequence_length=12),
    "mlp": MlpShape(num_layers=3, input_size=20, hidden_size=16, num_classes=5),
    "convnet": ConvNetShape(num_layers=3, channels=8),
    "convnet-group": ConvNetShape(num_layers=3, channels=12, norm="group"),
}  # fmt: skip
HF_FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "bert")


def hf_config(family: str, **changes: Any) -> Any:
    import transformers

    llama = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 16, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    plain = {key: value for key, value in llama.items() if key != "num_key_value_heads"}
    gpt2 = {
        "vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 16, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    settings: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, llama),
        "qwen2": (transformers.Qwen2Config, llama | {"tie_word_embeddings": True}),
        "qwen3": (transformers.Qwen3Config, llama | {"head_dim": 8}),
        "gpt2": (transformers.GPT2Config, gpt2),
        "bert": (transformers.BertConfig, plain),
    }
    kind, sizes = settings[family]
    return kind(**(sizes | changes))


def build_family(family: str, folder: Path, **changes: Any) -> Blueprint:
    """Return the blueprint of a reference model or of a Hugging Face family, its config saved in `folder`."""
    if family in REFERENCES:
        return build_reference(REFERENCES[family])
    hf_config(family, **changes).save_pretrained(folder)
    return build_hf(ModelRecipe(hf=str(folder), sequence_length=12))


def layout_by_hand(blueprint: Blueprint, parts: int = 1, index: int = 0) -> ModelLayout:
    layout, first = ModelLayout(), dict[int, str]()
    whole = blueprint.module
    tensors = [*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        split = split_by_hand(blueprint, name, parts, index) if parts > 1 else None
        layout.entries[name] = ParameterLayout(
            name=first.setdefault(id(tensor), name),
            shape=tensor.shape,
            placements={} if split is None else {"tensor": split},
        )
    return layout


def split_by_hand(blueprint: Blueprint, name: str, parts: int, index: int) -> Split | None:
    owner, _, leaf = name.rpartition(".")
    rule = next((rule for rule in blueprint.split if fnmatchcase(owner, rule.match)), None)
    kinds = ("column", "row", "vocab", "channel_out", "channel_in", "channels")
    if rule is None or rule.kind not in kinds or (rule.kind in ("row", "channel_in") and leaf == "bias"):
        return None
    if rule.kind == "channels" and leaf == "num_batches_tracked":
        return None
    transposed = type(blueprint.module.get_submodule(owner)).__name__ == "Conv1D" and leaf == "weight"
    dim = (rule.kind in ("row", "channel_in")) != transposed
    return Split(dim=int(dim), parts=parts, index=index, blocks=rule.blocks)


def real(
    blueprint: Blueprint, dtype: torch.dtype = torch.float64, seed: int = 7, parts: int = 1, index: int = 0
) -> Any:
    part = copy.deepcopy(blueprint.module)
    materialise(part, blueprint, layout_by_hand(blueprint, parts, index), seed, CPU, dtype)
    return part


def batch_of(blueprint: Blueprint, batch_size: int = 2, seed: int = 3) -> dict[str, Tensor]:
    """A batch of real random fields with the shapes of the blueprint's example, integers below 5 for labels."""
    assert blueprint.example is not None
    generator = torch.Generator().manual_seed(seed)
    fields: dict[str, Tensor] = {}
    for name, field in blueprint.example(batch_size).items():
        if field.is_floating_point():
            fields[name] = torch.randn(field.shape, dtype=torch.float64, generator=generator)
        else:
            fields[name] = torch.randint(1, 64 if name == "tokens" else 5, field.shape, generator=generator)
    return fields


def run(module: nn.Module, blueprint: Blueprint, batch: dict[str, Tensor]) -> Any:
    return module(**{keyword: batch[field] for keyword, field in blueprint.inputs.items()})


class Received(nn.Module):
    def __init__(self, activation: Tensor) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.activation


class FirstArgument(nn.Module):
    def forward(self, first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return first


def stage_by_hand(whole: nn.Module, blueprint: Blueprint, first: int, last: int, received: Tensor | None) -> nn.Module:
    """The whole model with foreign modules substituted; `received` is None on the first stage."""
    cut = blueprint.cut
    assert cut is not None
    stage = copy.deepcopy(whole)
    if received is not None:
        stage.set_submodule(cut.entry, Received(received))
        for name in cut.stem_zero:
            stage.set_submodule(name, Received(torch.zeros((), dtype=received.dtype)))
        for name in cut.stem_skip:
            stage.set_submodule(name, FirstArgument())
    is_last = last == len(cut.blocks)
    foreign = [name for index, name in enumerate(cut.blocks) if not first <= index < last]
    for name in (*foreign, *(() if is_last else cut.tail)):
        stage.set_submodule(name, FirstArgument())
    return stage
