"""A small residual convolutional classifier, written as on one device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.recipe import ConvNetShape
from weft.model._initialise import module_default
from weft.model.blueprint import Blueprint
from weft.model.description import description_of_shape
from weft.model.examples import image_example
from weft.model.families import CutTable, SplitRule
from weft.model.losses import class_loss


class ConvBlock(nn.Module):
    """Two convolutions before the sum.  Source: He et al. 2016, https://arxiv.org/abs/1603.05027."""

    def __init__(self, shape: ConvNetShape) -> None:
        super().__init__()
        self.norm1 = make_norm(shape)
        self.conv1 = nn.Conv2d(shape.channels, shape.channels, 3, padding=1, bias=False)
        self.norm2 = make_norm(shape)
        self.conv2 = nn.Conv2d(shape.channels, shape.channels, 3, padding=1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.conv1(F.relu(self.norm1(hidden)))
        return hidden + self.conv2(F.relu(self.norm2(inner)))


class ConvHead(nn.Module):
    def __init__(self, shape: ConvNetShape) -> None:
        super().__init__()
        self.norm = make_norm(shape)
        self.classes = nn.Linear(shape.channels, shape.num_classes)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.classes(F.relu(self.norm(hidden)).mean((2, 3)))


class ConvNet(nn.Module):
    """Images (batch, channels, height, width) → logits (batch, classes)."""

    def __init__(self, shape: ConvNetShape) -> None:
        super().__init__()
        self.stem = nn.Conv2d(shape.image_channels, shape.channels, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(ConvBlock(shape) for _ in range(shape.num_layers))
        self.head = ConvHead(shape)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def make_norm(shape: ConvNetShape) -> nn.Module:
    """Batch statistics, or groups of up to 8 channels that know nothing of the batch."""
    if shape.norm == "batch":
        return nn.BatchNorm2d(shape.channels)
    return nn.GroupNorm(shape.channels // math.gcd(shape.channels, 8), shape.channels)


def build_convnet(shape: ConvNetShape) -> Blueprint:
    """Return the classifier on the meta device with its tables."""
    with torch.device("meta"):
        module = ConvNet(shape)
    return Blueprint(
        module=module,
        inputs={"images": "images"},
        loss=class_loss,
        initialise=module_default,
        split=(
            SplitRule(match="blocks.*.conv1", kind="channel_out"),
            SplitRule(match="blocks.*.norm2", kind="channels"),
            SplitRule(match="blocks.*.conv2", kind="channel_in"),
        ),
        cut=CutTable(
            entry="stem", blocks=tuple(f"blocks.{index}" for index in range(shape.num_layers)), tail=("head",)
        ),
        task="classification",
        example=image_example((shape.image_channels, shape.image_size, shape.image_size)),
    ).described_by(description_of_shape(shape))
