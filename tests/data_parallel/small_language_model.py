"""A language model small enough to train dozens of times in a test: characters of Python's own source, two data ranks.

Gradients go through the buckets as in any training; the optimizer is SGD with momentum, which forgives nothing: what a
codec loses without feedback is lost.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import typing

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm import Mesh
from weft.comm.compress import Compression
from weft.parallel import ParameterLayout
from weft.parallel.buckets import Member
from weft.parallel.data import BucketStore
from weft.plan import MeshPlan

CONTEXT, WIDTH, BATCH = 10, 128, 48
"""Characters seen, units of a layer, samples per step and rank."""
CHARACTERS = 96
"""Printable ASCII; everything else is one more."""
LEARNING_RATE, MOMENTUM = 0.1, 0.9
_VALIDATED = 4096


def text() -> Tensor:
    """(characters,) of three modules of the standard library."""
    source = "".join(inspect.getsource(module) for module in (argparse, ast, typing))
    return torch.tensor([min(max(ord(letter) - 31, 0), CHARACTERS - 1) for letter in source])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 16)
        self.first = nn.Linear(CONTEXT * 16, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.embedding(tokens).flatten(1)))
        return self.head(torch.tanh(self.second(hidden)))


def _samples(data: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    return data[places[:, None] + torch.arange(CONTEXT)], data[places + CONTEXT]


def final_loss(compression: Compression | None, seed: int, steps: int, data: Tensor) -> float:
    """Train on this world's ranks and return the validation loss.  `seed` decides weights and order of the data, so
    runs with and without compression are pairs."""
    mesh = Mesh(MeshPlan(replicate=dist.get_world_size()), torch.device("cpu"))
    torch.manual_seed(seed)
    model = Model()
    members = [
        Member(parameter=p, layout=ParameterLayout(name=name, shape=p.shape), part=0, group=0)
        for name, p in model.named_parameters()
    ]
    store = BucketStore(
        members, mesh, zero=0, compute_dtype=torch.float32, gradient_dtype=torch.float32,
        bucket_bytes=2_000_000, first_bucket_bytes=2_000_000, compression=compression,
    )  # fmt: skip
    velocities = [torch.zeros_like(shard.master) for shard in store.shards]
    order = torch.Generator().manual_seed(1000 * seed + mesh.rank)
    cut = len(data) * 9 // 10
    for step in range(steps):
        tokens, labels = _samples(data, torch.randint(cut - CONTEXT, (BATCH,), generator=order))
        store.begin_step()
        store.on_last_forward(0)
        (F.cross_entropy(model(tokens), labels) / mesh.size("data")).backward()
        store.on_last_backward(0)
        store.finish()
        rate = LEARNING_RATE * min(1.0, 2 * (steps - step) / steps)
        for shard, velocity in zip(store.shards, velocities, strict=True):
            assert shard.gradient is not None
            velocity.mul_(MOMENTUM).add_(shard.gradient)
            shard.master.sub_(velocity, alpha=rate)
        store.on_applied(())
        store.publish()
    store.close()
    places = torch.linspace(cut, len(data) - CONTEXT - 1, _VALIDATED).long()
    with torch.no_grad():
        tokens, labels = _samples(data, places)
        return float(F.cross_entropy(model(tokens), labels))
