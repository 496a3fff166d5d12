"""What profiles say blocks keep, against what autograd keeps of Weft's own blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from weft.config.recipe import (
    BatchRecipe,
    ConvNetShape,
    DecoderShape,
    EncoderShape,
    MlpShape,
    ModelRecipe,
    Recipe,
    ReferenceShape,
    RunRecipe,
)
from weft.model.build import build_model
from weft.model.description import profile_of
from weft.planning.price import Memories, memory_key
from weft.techniques.cost_terms import WEFT, Layout, PricedPrecision

SAMPLES = 4
SHAPES: list[ReferenceShape] = [
    DecoderShape(num_layers=2, hidden_size=256, num_heads=8, num_kv_heads=4, sequence_length=64, vocabulary_size=512),
    DecoderShape(num_layers=2, hidden_size=256, num_heads=8, sequence_length=64, vocabulary_size=512, dropout=0.1),
    EncoderShape(num_layers=2, hidden_size=256, num_heads=8, sequence_length=64, vocabulary_size=512, dropout=0.0),
    EncoderShape(num_layers=2, hidden_size=256, num_heads=8, sequence_length=64, vocabulary_size=512, dropout=0.1),
    MlpShape(num_layers=2, input_size=64, hidden_size=128, num_classes=10),
    ConvNetShape(num_layers=2, channels=16, norm="group"),
    ConvNetShape(num_layers=2, channels=16, norm="batch"),
]


def kept_bytes(block: nn.Module, *inputs: Tensor | None) -> int:
    """Bytes of the storages that autograd keeps, parameters left out, each once."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = block(*inputs)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    del result
    return sum(size for pointer, size in kept.items() if pointer not in parameters)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_keep_what_their_profile_says(shape: ReferenceShape, precision: PricedPrecision) -> None:
    recipe = Recipe(model=ModelRecipe(shape=shape), batch=BatchRecipe(global_batch_size=4), run=RunRecipe(steps=1))
    profile = profile_of(recipe)
    assert profile is not None
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    block = build_model(recipe).module.get_submodule("blocks.0").to_empty(device="cpu").to(dtype)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    measured = kept_bytes(block, *_inputs(shape, dtype))
    flash = not (isinstance(shape, EncoderShape) and shape.dropout > 0)
    memories = Memories(profile, replace(WEFT, flash_attention=flash), on_accelerator=False)
    key = memory_key(Layout(microbatch_size=SAMPLES, precision=precision))
    assert memories.blocks.memory(profile.blocks[0], key).kept_bytes == pytest.approx(measured, rel=0.1)


def _inputs(shape: ReferenceShape, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    if isinstance(shape, ConvNetShape):
        image = torch.randn(SAMPLES, shape.channels, shape.image_size, shape.image_size, dtype=dtype)
        return (image.requires_grad_(),)
    if isinstance(shape, MlpShape):
        return (torch.randn(SAMPLES, shape.hidden_size, dtype=dtype).requires_grad_(),)
    hidden = torch.randn(SAMPLES, shape.sequence_length, shape.hidden_size, dtype=dtype).requires_grad_()
    if isinstance(shape, EncoderShape):
        return hidden, None
    table = torch.randn(shape.sequence_length, shape.hidden_size // shape.num_heads, dtype=dtype)
    return hidden, table, table, None
