"""What drawn programs of a session import: a model, its data, its plans, and what they note of their results."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.model.families import CutTable

__all__ = [
    "CUT",
    "SPLIT",
    "Counts",
    "DataLoader",
    "Net",
    "Path",
    "Trouble",
    "errors",
    "held_out",
    "loss_fn",
    "plan_for",
    "samples",
    "stored",
    "sys",
    "torch",
    "weft",
]

BATCH, WIDTH, CLASSES, ROWS = 12, 6, 4, 50
KINDS = ("data", "uneven", "zero1", "zero2", "zero3", "pipeline", "tensor")
CUT = CutTable(entry="stem", blocks=("blocks.0", "blocks.1"), tail=("head",))
SPLIT = {"stem": "column", "blocks.0.0": "row"}


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2)) for _ in "ab")
        self.head = nn.Linear(width, CLASSES)
        self.double()

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.stem(rows)
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


class Counts:
    """A thing with a state."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Trouble:
    """What a rank's loss does from now on."""

    in_loss = False


def samples(size: int = ROWS, seed: int = 0) -> TensorDataset:
    rows = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(rows, rows[:, :CLASSES].argmax(-1))


def held_out(size: int, batch: int, *, shuffled: int | None = None) -> DataLoader[Any]:
    """Samples beside those of the training; `shuffled` by a seed of this rank's own."""
    if shuffled is None:
        return DataLoader(samples(size, 1), batch_size=batch)
    return DataLoader(samples(size, 1), batch, shuffle=True, generator=torch.Generator().manual_seed(shuffled))


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    if Trouble.in_loss:
        raise ValueError("of the loss")
    return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def errors(predictions: Tensor, targets: Tensor) -> Tensor:
    return predictions.argmax(-1).ne(targets).sum()


def plan_for(kind: str) -> Plan | str:
    """A plan of that kind for the ranks of this job."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if kind == "auto":
        return "auto"
    axes: dict[str, Any] = {}
    per_step: int | tuple[int, ...] = BATCH // 2 // world
    if world > 1:
        axes = {kind if kind in ("tensor", "pipeline") else "shard" if kind == "zero3" else "replicate": world}
        per_step = {"tensor": 6, "pipeline": 6, "uneven": (1, 5)}.get(kind, per_step)
    zero = int(kind.removeprefix("zero")) if kind.startswith("zero") else 0
    return Plan(
        mesh=MeshPlan(**axes),
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=2, per_step=per_step),
        compute=ComputePlan(precision="fp64"),
    )


def stored(folder: Path) -> list[float]:
    """The norms of exported weights."""
    from safetensors.torch import load_file

    whole = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return [float(value.norm()) for part in whole for _, value in sorted(part.items())]
