"""What drawn programs import: torch, and the data of each form of batch.  Nothing of Weft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

__all__ = ["F", "Pool", "Tensor", "flat", "labels", "nn", "saw", "torch", "two_groups"]

ROWS, BATCH, CLASSES = 24, 8, 4
SAID: list[tuple[str, Any]] = []
"""What programs have noted."""


def saw(what: str, value: object) -> None:
    """Note what a forward has seen; where draws are taken out (dropout keeps all), there is nothing to see."""
    SAID.append((what, value))


class Pool(nn.Module):
    """Mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Named(NamedTuple):
    x: Tensor
    y: Tensor


def two_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices, and the rest with another rate."""
    many = [value for value in parameters if value.ndim > 1]
    few = [value for value in parameters if value.ndim <= 1]
    return [{"params": many}, {"params": few, "lr": 0.01}]


def rows_of(skeleton: str, dtype: torch.dtype, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a data set."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 36, generator=source, dtype=torch.float64)
    y = x[:, :CLASSES].argmax(1)
    if skeleton == "tokens":
        return ((x[:, :6] * 2).long() + 4).clamp(0, 8), y
    shape = {"rows": (6,), "attention": (4, 3), "images": (1, 6, 6)}[skeleton]
    return x[:, : torch.Size(shape).numel()].reshape(size, *shape).to(dtype), y


def flat(form: str, batch: Any) -> Tensor:
    """Six numbers of each sample."""
    x = _pick(form, batch, 0).flatten(1)[:, :6]
    return x / 4 - 1 if not x.is_floating_point() else x


def labels(form: str, batch: Any) -> Tensor:
    """The labels of a batch."""
    if form == "alone":
        return batch.flatten(1)[:, :CLASSES].argmax(1)
    return _pick(form, batch, 1)


def inputs_of(form: str, batch: Any) -> Any:
    """What the model is called with."""
    return _pick(form, batch, 0)


def _pick(form: str, batch: Any, place: int) -> Any:
    match form:
        case "alone":
            return batch
        case "nested":
            return batch["inputs"]["x"] if place == 0 else batch["targets"]["y"]
        case "deep":
            return batch[0] if place == 0 else batch[1][0]
        case "dict" | "texts" | "none" | "number" | "constant" | "masked":
            return batch["xy"[place]]
        case "swapped":
            return batch[place]
        case "named":
            return batch.x if place == 0 else batch.y
        case "lists":
            return batch[0] if place == 0 else torch.as_tensor(batch[1])
        case _:
            return batch[place]


class Samples(Dataset[Any]):
    """A data set in the form of a program's batches."""

    def __init__(self, form: str, x: Tensor, y: Tensor) -> None:
        self.form, self.x, self.y = form, x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int) -> Any:
        x, y = self.x[place], self.y[place]
        match self.form:
            case "alone":
                return x
            case "nested":
                return {"inputs": {"x": x}, "targets": {"y": y}}
            case "deep":
                return [x, [y, y.float()]]
            case "texts":
                return {"x": x, "y": y, "text": f"sample {place}"}
            case "number":
                return {"x": x, "y": y, "place": place, "weight": 0.5}
            case "dict" | "none" | "constant":
                return {"x": x, "y": y}
            case "masked":
                return {"x": x, "y": y, "mask": torch.tensor(place % 3 > 0)}
            case "named":
                return Named(x, y)
            case _:
                return x, y


def _collate(form: str) -> Any:
    stack = torch.utils.data.default_collate

    def collate(samples: list[Any]) -> Any:
        match form:
            case "none":
                return {**stack(samples), "mask": None}
            case "constant":
                return {**stack(samples), "rate": torch.tensor(0.5)}
            case "lists":
                return [torch.stack([x for x, _ in samples]), [int(y) for _, y in samples]]
            case "tuple":
                return tuple(stack(samples))
            case "swapped":
                return dict(enumerate(stack(samples)))
            case _:
                return stack(samples)

    return collate


class Batches:
    """An iterable of batches without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader_of(form: str, skeleton: str, dtype: torch.dtype, *, size: int = ROWS, seed: int = 0) -> Any:
    """The loader of a program, with the same batches in every epoch."""
    x, y = rows_of(skeleton, dtype, size, seed)
    if form in ("iterable", "short", "sizes") and size == ROWS:
        sizes = {"short": (8, 8, 4), "sizes": (8, 6, 7)}.get(form, (8, 8, 8))
        parts = [[*part] for part in zip(x[: sum(sizes)].split(sizes), y[: sum(sizes)].split(sizes), strict=True)]
        return Batches(parts) if form == "iterable" else parts
    return DataLoader(Samples(form, x, y), batch_size=BATCH, collate_fn=_collate(form))
