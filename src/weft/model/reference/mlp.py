"""A residual multi-layer perceptron for classification, written as on one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.plan import default_ffn_size
from weft.config.recipe import MlpShape
from weft.model._initialise import module_default
from weft.model.blueprint import Blueprint
from weft.model.description import description_of_shape
from weft.model.examples import image_example
from weft.model.families import CutTable, SplitRule
from weft.model.losses import class_loss


class MlpBlock(nn.Module):
    def __init__(self, hidden_size: int, ffn_size: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, ffn_size)
        self.down = nn.Linear(ffn_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(F.gelu(self.up(self.norm(hidden)))))


class Mlp(nn.Module):
    """Samples (batch, …) with `input_size` values each → logits (batch, classes)."""

    def __init__(self, shape: MlpShape) -> None:
        super().__init__()
        ffn_size = default_ffn_size(shape)
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(shape.input_size, shape.hidden_size))
        self.blocks = nn.ModuleList(
            MlpBlock(shape.hidden_size, ffn_size, shape.dropout) for _ in range(shape.num_layers)
        )
        self.norm = nn.LayerNorm(shape.hidden_size)
        self.head = nn.Linear(shape.hidden_size, shape.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def build_mlp(shape: MlpShape) -> Blueprint:
    """Return the perceptron on the meta device with its tables."""
    with torch.device("meta"):
        module = Mlp(shape)
    return Blueprint(
        module=module,
        inputs={"images": "images"},
        loss=class_loss,
        initialise=module_default,
        split=(
            SplitRule(match="blocks.*.up", kind="column"),
            SplitRule(match="blocks.*.down", kind="row"),
        ),
        cut=CutTable(
            entry="stem",
            blocks=tuple(f"blocks.{index}" for index in range(shape.num_layers)),
            tail=("norm", "head"),
        ),
        task="classification",
        example=image_example((shape.input_size,)),
    ).described_by(description_of_shape(shape))
