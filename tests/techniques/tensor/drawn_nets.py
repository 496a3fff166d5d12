"""Small networks drawn from a seed: steps that mix features, channels or tokens, at times in one mode only."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.model.blueprint import Batch, Blueprint
from weft.model.examples import token_example
from weft.model.losses import token_loss

CHANNELS, SIDE, WIDTH, LENGTH, VOCABULARY = 8, 4, 16, 6, 32
When = Callable[[nn.Module], bool]
Step = Callable[[Tensor], Tensor]
WHEN: dict[str, When] = {
    "always": lambda module: True,
    "evaluated": lambda module: not module.training,
    "trained": lambda module: module.training,
    "without gradients": lambda module: not torch.is_grad_enabled(),
}
ON_IMAGES: dict[str, Step] = {
    "softmax": lambda x: x.softmax(1),
    "mean of channels": lambda x: x - x.mean(1, keepdim=True),
    "mean of places": lambda x: x - x.mean((2, 3), keepdim=True),
    "shuffle": lambda x: x.view(len(x), 2, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2),
    "flip": lambda x: x.flip(1),
    "halves": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "largest": lambda x: x * x.amax(1, keepdim=True),
    "pool": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "sum along": lambda x: x.cumsum(1),
    "norm": lambda x: F.normalize(x, dim=1),
    "double": lambda x: 2 * x.tanh(),
    "transpose": lambda x: x.transpose(2, 3),
    "sort": lambda x: x.sort(1).values,
}
ON_TOKENS: dict[str, Step] = {
    "softmax": lambda x: x.softmax(-1),
    "mean of features": lambda x: x - x.mean(-1, keepdim=True),
    "mean of tokens": lambda x: x - x.mean(1, keepdim=True),
    "softmax of tokens": lambda x: x.softmax(1),
    "swap": lambda x: x.view(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2),
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, 1),
    "normalised": lambda x: F.layer_norm(x, x.shape[-1:]),
    "scores": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "double": lambda x: 2 * x.tanh(),
    "sum along": lambda x: x.cumsum(-1),
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
}


class Sometimes(nn.Module):
    """A step that is taken now and then."""

    def __init__(self, draw: Random, steps: dict[str, Step]) -> None:
        super().__init__()
        self.name, self.when = draw.choice(sorted(steps)), draw.choice(sorted(WHEN))
        self.step, self.is_on, self.adds = steps[self.name], WHEN[self.when], draw.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_on(self):
            return x
        return x + self.step(x) if self.adds else self.step(x)

    def extra_repr(self) -> str:
        return f"{self.name} {self.when}{' added' if self.adds else ''}"


class Excited(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class ChannelsLast(nn.Module):
    """A linear pair over channels, or over the last places."""

    def __init__(self, draw: Random, channels: int) -> None:
        super().__init__()
        self.moves = draw.random() < 0.6
        width = channels if self.moves else SIDE
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1) if self.moves else x
        x = self.down(self.up(x).relu())
        return x.permute(0, 3, 1, 2) if self.moves else x


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def _image_layer(draw: Random) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.BatchNorm2d(CHANNELS),
        lambda: nn.GroupNorm(draw.choice((2, 4)), CHANNELS),
        lambda: nn.Dropout(0.2),
        lambda: nn.Dropout2d(0.2),
        nn.ReLU,
        lambda: Excited(CHANNELS),
        lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=draw.choice((2, CHANNELS))),
        lambda: ChannelsLast(draw, CHANNELS),
    ]
    return draw.choice(kinds)()


class Images(nn.Module):
    def __init__(self, draw: Random) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 3, padding=1)]
        for _ in range(draw.randint(1, 3)):
            inner = [_image_layer(draw) for _ in range(draw.randint(0, 2))]
            if draw.random() < 0.6:
                inner.insert(draw.randint(0, len(inner)), Sometimes(draw, ON_IMAGES))
            block = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), *inner, nn.Conv2d(CHANNELS, CHANNELS, 1))
            layers.append(Residual(block) if draw.random() < 0.5 else block)
        self.layers, self.pools, self.last = nn.Sequential(*layers), draw.random() < 0.5, draw.random() < 0.5
        self.head = nn.Linear(CHANNELS * (1 if self.pools else SIDE * SIDE), 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layers(images)
        if self.pools:
            return self.head(x.mean((2, 3)))
        return self.head((x.permute(0, 2, 3, 1) if self.last else x).flatten(1))


class Attention(nn.Module):
    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.heads, self.fused, self.written = 4, draw.random() < 0.5, draw.random() < 0.5
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.drop = Sometimes(draw, ON_TOKENS), nn.Dropout(0.1)
        self.is_strange = draw.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, self.heads, -1) if self.fused else (*x.shape[:2], 3, -1, WIDTH // 4)
        q, k, v = self.qkv(self.query(x) if self.is_strange else x).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        if self.written:
            mixed = self.drop((q @ k.transpose(-1, -2) / 2).softmax(-1)) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)
        self.step = Sometimes(draw, ON_TOKENS) if draw.random() < 0.6 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(self.step(F.silu(gate) * value))


class Tokens(nn.Module):
    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers: list[nn.Module] = []
        for _ in range(draw.randint(1, 3)):
            inner: list[nn.Module] = [nn.LayerNorm(WIDTH)] if draw.random() < 0.5 else []
            if draw.random() < 0.3:
                inner.append(Sometimes(draw, ON_TOKENS))
            kind = draw.choice(("attention", "gated", "plain"))
            if kind == "plain":
                middle = [Sometimes(draw, ON_TOKENS)] if draw.random() < 0.6 else [nn.Dropout(0.1)]
                inner += [nn.Linear(WIDTH, 32), nn.GELU(), *middle, nn.Linear(32, WIDTH)]
            else:
                inner.append(Attention(draw) if kind == "attention" else Gated(draw))
            layers.append(Residual(nn.Sequential(*inner)))
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, VOCABULARY)
        self.returns = Sometimes(draw, ON_TOKENS) if draw.random() < 0.4 else nn.Identity()
        if draw.random() < 0.3:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.returns(self.head(self.layers(self.embedding(tokens))))


def squares(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """A loss that reads no labels."""
    return outputs.square().sum(), torch.tensor(float(outputs.shape[0]))


def drawn_net(seed: int) -> Blueprint:
    """The network of a seed: even ones of images, odd ones of tokens."""
    draw = Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Images(draw) if seed % 2 == 0 else Tokens(draw)
    if seed % 2:
        inputs = {"tokens": "tokens"}
        return Blueprint(
            module=module, inputs=inputs, loss=token_loss, initialise=None, vocabulary_size=VOCABULARY,
            sequence_length=LENGTH, example=token_example(LENGTH, inputs.values()),
        )  # fmt: skip

    def example(samples: int) -> dict[str, Tensor]:
        ids = torch.empty(samples, dtype=torch.int64, device="meta")
        return {"images": torch.empty(samples, 3, SIDE, SIDE, device="meta"), "sample_ids": ids}

    return Blueprint(module=module, inputs={"images": "images"}, loss=squares, initialise=None, example=example)
