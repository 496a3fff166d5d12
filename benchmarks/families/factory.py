"""What a user would write for a model that Weft takes no folder of: a factory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from benchmarks.families._draw import construct
from benchmarks.families._samples import Samples, samples_of, with_image
from weft.model.blueprint import Blueprint
from weft.model.losses import class_loss


def build(folder: str, auto: str) -> Blueprint:
    """A family's small model with its samples and its loss."""
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.use_cache = False
    model = construct(config, auto)
    samples = samples_of(model, auto)
    if samples.image_tokens is not None:
        model.register_forward_pre_hook(_image_first(samples), with_kwargs=True)
    reads_tokens = list(samples.fields) == ["input_ids"]
    inputs = {"input_ids": "tokens"} if reads_tokens else {name: name for name in samples.fields}

    def example(batch_size: int) -> dict[str, Tensor]:
        batch = samples.example(batch_size)
        return {inputs.get(name, name): field for name, field in batch.items()}

    tasks = {"AutoModelForCausalLM": "causal_lm", "AutoModelForMaskedLM": "masked_lm"}
    length = samples.labels[0] if reads_tokens else None
    return Blueprint(
        module=model,
        inputs=inputs,
        loss=samples.loss,
        initialise=None,
        task=tasks.get(auto, "other"),  # type: ignore[arg-type]
        vocabulary_size=samples.vocabulary,
        example=example,
        sequence_length=length,
    )


def _image_first(samples: Samples) -> Any:
    assert samples.image_tokens is not None
    token, count = samples.image_tokens

    def place(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"input_ids": with_image(kwargs["input_ids"], token, count)}

    return place


class Mlp(nn.Module):
    """Layers with skip connections, the last of which reaches from the first to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, rows: Tensor) -> Tensor:
        first = hidden = self.stem(rows)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(torch.cat([first, hidden], -1))


class Rnn(nn.Module):
    """A classifier of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.rnn = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(words))[0][:, -1])


class Towers(nn.Module):
    """Two towers whose product is a score."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.EmbeddingBag(100, 32), nn.Embedding(100, 32)
        self.left = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.right = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.left(self.users(user)) * self.right(self.items(item))).sum(-1)


class ConvNet(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU())
            for inner, outer in zip(widths, widths[1:], strict=False)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.layers:
            images = layer(images)
        return self.head(images.mean((2, 3)))


def score_loss(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Squared error of a score."""
    total = (outputs - batch["wanted"]).square().sum()
    return total, total.new_full((), float(outputs.shape[0]), dtype=torch.float64)


def own(name: str) -> Blueprint:
    """One of the modules of plain torch."""
    whole, real = torch.int64, torch.float32
    label = {"labels": ((), whole)}
    module, fields, labels, loss = {
        "mlp": (Mlp, {"rows": ((24,), real)}, label, class_loss),
        "rnn": (Rnn, {"words": ((12,), whole)}, label, class_loss),
        "towers": (Towers, {"user": ((3,), whole), "item": ((), whole)}, {"wanted": ((), real)}, score_loss),
        "convnet": (ConvNet, {"images": ((3, 16, 16), real)}, label, class_loss),
    }[name]

    def example(batch_size: int) -> dict[str, Tensor]:
        shapes = {**fields, **labels, "sample_ids": ((), whole)}
        return {
            key: torch.empty(batch_size, *shape, dtype=kind, device="meta") for key, (shape, kind) in shapes.items()
        }

    return Blueprint(
        module=module(),
        inputs={key: key for key in fields},
        loss=loss,
        initialise=None,
        task="classification" if loss is class_loss else "other",
        vocabulary_size=None,
        example=example,
    )
