"""What users may name in `model.factory`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.config.recipe import MlpShape
from weft.model.blueprint import Blueprint
from weft.model.build import build_reference

number = 3


def classifier(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.head = nn.Linear(8, 17)

    def forward(self, input_ids: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self.embedding(input_ids)) * scale


class Strange(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


def blueprint() -> Blueprint:
    return build_reference(MlpShape(num_layers=1, input_size=6, hidden_size=4, num_classes=3))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


def text() -> str:
    return "model"


def broken() -> nn.Module:
    raise OSError("disk on fire")
