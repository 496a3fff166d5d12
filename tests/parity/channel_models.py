"""Convolutional networks as users write them, without tables: each kind of thing that may stand between two
convolutions whose channels are shared out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.analysis.blueprint import look_for_blocks
from weft.analysis.look import look
from weft.model.blueprint import Blueprint
from weft.model.losses import class_loss

CLASSES, IMAGE = 10, (3, 10, 10)


class BasicBlock(nn.Module):
    """Two convolutions, a sum, and rectifiers that write into their input: a ResNet's, as libraries have it."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int, downsample: nn.Module | None, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """Narrow in the middle; in groups, it is a ResNeXt's."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int, downsample: nn.Module | None, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Stages of blocks, each half as high and wide as the one before, and a classifier over the mean."""

    def __init__(self, block: type[BasicBlock | Bottleneck], layers: tuple[int, ...], groups: int = 1) -> None:
        super().__init__()
        self.inside = 8
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.stages = nn.ModuleList(self._stage(block, 8 * 2**i, n, 1 + (i > 0), groups) for i, n in enumerate(layers))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(self.inside, CLASSES)

    def _stage(self, block: type[BasicBlock | Bottleneck], width: int, count: int, stride: int, groups: int):
        outside, blocks = width * block.expansion, list[nn.Module]()
        for index in range(count):
            step, downsample = stride if index == 0 else 1, None
            if step != 1 or self.inside != outside:
                convolution = nn.Conv2d(self.inside, outside, 1, step, bias=False)
                downsample = nn.Sequential(convolution, nn.BatchNorm2d(outside))
            blocks.append(block(self.inside, width, step, downsample, groups))
            self.inside = outside
        return nn.Sequential(*blocks)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in self.stages:
            x = stage(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Squeeze(nn.Module):
    """Channels are scaled by what all of them say together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(width, 4, 1)
        self.fc2 = nn.Conv2d(4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """Wide in the middle, where each channel has a filter of its own."""

    def __init__(self, inside: int, wide: int, outside: int, stride: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(inside, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        self.depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.norm = nn.BatchNorm2d(wide, momentum=None)
        self.squeeze = Squeeze(wide)
        self.project = nn.Conv2d(wide, outside, 1, bias=False)
        self.is_residual = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        out = self.project(self.squeeze(F.relu6(self.norm(self.depthwise(self.expand(x))))))
        return x + out if self.is_residual else out


class Mobile(nn.Module):
    """Its last convolution feeds a classifier whose input comes in parts, through a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.blocks = nn.ModuleList([Inverted(8, 24, 8, 1), Inverted(8, 32, 16, 2), Inverted(16, 32, 16, 1)])
        self.last = nn.Sequential(nn.Conv2d(16, 40, 1, bias=False), nn.BatchNorm2d(40, affine=False), nn.ReLU6())
        self.classifier = nn.Sequential(nn.Dropout(0.3), nn.Linear(40, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.classifier(self.last(x).mean((2, 3)))


class Plain(nn.Module):
    """Convolutions with biases one after another, all ways of dropping, norms over groups, slopes for each channel and
    for all, and a classifier that reads whole images; nine channels that two ranks cannot share."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), nn.GroupNorm(4, 8), nn.PReLU(8), nn.Dropout(0.2),
            nn.Conv2d(8, 9, 3, padding=1, padding_mode="reflect"), nn.ELU(),
            nn.Conv2d(9, 9, 3, padding="same"), nn.BatchNorm2d(9), nn.AvgPool2d(2),
            nn.Conv2d(9, 12, 3, dilation=2, padding=2), nn.PReLU(), nn.Dropout2d(0.3), nn.MaxPool2d(2),
            nn.Conv2d(12, 6, 3, padding=1), nn.ReLU(),
            nn.Conv2d(6, 8, 3, padding=1), nn.GELU(), nn.Upsample(scale_factor=2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Dropout(0.1), nn.Linear(8 * 16, 14), nn.ReLU(), nn.Linear(14, 10), nn.ReLU(), nn.Linear(10, CLASSES)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


class Multiplied(nn.Module):
    """Two filters for each channel, and groups of several channels, behind a gate of two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, 2, 1)
        self.norm = nn.BatchNorm2d(16)
        self.twice = nn.Conv2d(8, 16, 3, 1, 1, groups=8)
        self.groups = nn.Conv2d(16, 24, 3, 1, 1, groups=4)
        self.across = nn.Conv2d(24, 8, 1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.glu(self.norm(self.enter(images)), 1)
        x = self.across(F.silu(self.groups(F.tanh(self.twice(x)))))
        return self.head(x.amax((2, 3)))


class Frozen(ResNet):
    """Batch norms stay as they are, and so do the weights of some layers."""

    def __init__(self) -> None:
        super().__init__(BasicBlock, (2, 1))
        for name, module in self.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                for leaf in ("weight", "running_mean", "running_var"):
                    nn.init.uniform_(getattr(module, leaf), 0.5, 1.5)
            elif name == "stages.0.1.conv1":
                module.requires_grad_(False)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


class Tied(nn.Module):
    """Two pairs with the same weights, one of them with norms of its own; and a pair that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        pairs = [BasicBlock(8, 8, 1, None, 1) for _ in range(3)]
        pairs[1].conv1.weight, pairs[1].conv2.weight = pairs[0].conv1.weight, pairs[0].conv2.weight
        self.pairs = nn.ModuleList(pairs)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for index in (0, 1, 2, 2):
            x = self.pairs[index](x)
        return self.head(x.mean((2, 3)))


class Sound(nn.Module):
    """Along one dimension, and in three."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        convolution, norm = (nn.Conv1d, nn.BatchNorm1d) if dims == 1 else (nn.Conv3d, nn.BatchNorm3d)
        self.dims = dims
        self.one = convolution(3, 8, 3, padding=1)
        self.norm = norm(8, track_running_stats=dims == 1)
        self.pool = nn.MaxPool1d(2) if dims == 1 else nn.AvgPool3d((1, 2, 2))
        self.two = convolution(8, 6, 3, padding=1)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(2) if self.dims == 1 else images.unflatten(2, (2, 5))
        x = self.two(self.pool(F.leaky_relu(self.norm(self.one(x)))))
        return self.head(x.flatten(2).mean(2))


class Shuffled(nn.Module):
    """Channels change places between convolutions, as in a ShuffleNet; one dropout for all blocks, and a function that
    drops."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        drop = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "enter": nn.Conv2d(8, 24, 1, bias=False), "norm": nn.BatchNorm2d(24), "drop": drop,
                "each": nn.Conv2d(24, 24, 3, 1, 1, groups=8), "leave": nn.Conv2d(24, 8, 1),
            })
            for _ in range(2)
        )  # fmt: skip
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            inside = F.elu(block["norm"](block["enter"](x.softmax(1))))
            inside = inside.unflatten(1, (3, -1)).transpose(1, 2).flatten(1, 2)
            x = x + block["leave"](F.dropout(block["drop"](block["each"](inside)), 0.1, self.training))
        return self.head(x.mean((2, 3)))


NETS: Mapping[str, Callable[[], nn.Module]] = {
    "basic": lambda: ResNet(BasicBlock, (2, 1)),
    "bottleneck": lambda: ResNet(Bottleneck, (1, 2)),
    "grouped": lambda: ResNet(Bottleneck, (1, 1), groups=4),
    "mobile": Mobile,
    "plain": Plain,
    "multiplied": Multiplied,
    "shuffled": Shuffled,
    "frozen": Frozen,
    "tied": Tied,
    "line": lambda: Sound(1),
    "volume": lambda: Sound(3),
}


def build_channels(net: str) -> Blueprint:
    """A network with the table and the cut that looking at it shows."""

    def example(samples: int) -> dict[str, Tensor]:
        with torch.device("meta"):
            ids, labels = torch.zeros(2, samples, dtype=torch.int64)
            return {"images": torch.zeros(samples, *IMAGE), "labels": labels, "sample_ids": ids}

    blueprint = Blueprint(
        module=NETS[net](), inputs={"images": "images"}, loss=class_loss, initialise=None, task="classification",
        example=example,
    )  # fmt: skip
    look_for_blocks(blueprint)
    look(blueprint)
    assert blueprint.splits, blueprint.why_not("tensor")
    return blueprint
