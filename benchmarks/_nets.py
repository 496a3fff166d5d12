"""A session with and without the nets that watch while it runs."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft

WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model_of(settings: Mapping[str, Any]) -> nn.Module:
    """A stack of residual blocks of `width`, six tensors in each."""
    torch.manual_seed(0)
    width = int(settings.get("width", WIDTH))
    blocks = [Block(width) for _ in range(int(settings["blocks"]))]
    return nn.Sequential(nn.Linear(WIDTH, width), *blocks, nn.Linear(width, 8))


def loss_of(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def data_of(settings: Mapping[str, Any]) -> DataLoader[Any]:
    rows = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(rows, rows[:, :8].argmax(1)), batch_size=int(settings["batch"]), shuffle=True)


def session(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """A session's steps; `nets`: whether its nets are spread."""
    one_thread = {"compute.threads_per_rank": 1}  # as the step of so many small operators is fastest
    opened = weft.session(record=False, folder=tempfile.mkdtemp(), prove="never", quiet=True, settings=one_thread)
    live = opened.__enter__()
    if not settings["nets"]:
        nets = live._nets  # pyright: ignore[reportPrivateUsage]
        live._nets = dataclasses.replace(nets, **dict.fromkeys(dataclasses.asdict(nets), False))  # pyright: ignore[reportPrivateUsage]
    model = model_of(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    state = live.prepare(model, optimizer, data_of(settings), loss=loss_of)
    batches = iter(state.batches(1_000_000))

    def step(index: int, opened: Any = opened) -> float:  # which keeps the session open
        del index
        return state.step(next(batches)).loss

    return step
