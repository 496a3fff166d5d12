"""A language model small enough to train dozens of times in a test: characters of Python's own source, two data ranks.

Gradients go through the buckets as in any training; the optimizer is SGD with momentum, which forgives nothing: what a
codec loses without feedback is lost.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import typing
from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.config.plan import DataParallelPlan, MeshPlan
from weft.config.recipe import GroupSettings, OptimizerGroup
from weft.run.engine.optimizers import ShardOptimizer
from weft.run.engine.optimizers.adamw import AdamW
from weft.run.engine.optimizers.sgd import SGD
from weft.techniques.buckets.bucket_state import BucketMember
from weft.techniques.compression.codecs import CodecSpec
from weft.techniques.core import ParameterLayout
from weft.techniques.data.gradient_reducer import BucketReducer
from weft.techniques.local_steps.runtime import LocalRounds

CONTEXT, WIDTH, BATCH = 10, 128, 48
"""Characters seen, units of a layer, samples per step and rank."""
CHARACTERS = 96
"""Printable ASCII; everything else is one more."""
Rule = Literal["sgd", "adamw"]
LEARNING_RATES: Mapping[Rule, float] = {"sgd": 0.1, "adamw": 2e-3}
MOMENTUM = 0.9
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


def final_loss(
    compression: CodecSpec | None,
    seed: int,
    steps: int,
    data: Tensor,
    rule: Rule = "sgd",
    *,
    local: DataParallelPlan | None = None,
) -> float:
    """Train on this world's ranks and return the validation loss.  `seed` decides weights and order of the data, so
    runs with and without compression are pairs; `local` lets each rank step by itself."""
    whole = Mesh(MeshPlan(replicate=dist.get_world_size()), torch.device("cpu"))
    mesh = whole if local is None else whole.within_replica()
    torch.manual_seed(seed)
    model = Model()
    members = [
        BucketMember(mesh=mesh, parameter=p, layout=ParameterLayout(name=name, shape=p.shape), part=0, group=0)
        for name, p in model.named_parameters()
    ]
    store = BucketReducer(
        members, mesh, stage=0, compute_dtype=torch.float32, gradient_dtype=torch.float32,
        bucket_limits=(2_000_000, 2_000_000), compression=compression,
    )  # fmt: skip
    optimizer = _optimizer(rule, store, compression)
    rounds = LocalRounds(whole, local, last_step=steps) if local is not None else None
    if rounds is not None:
        rounds.attach_shards(store.shards)
    order = torch.Generator().manual_seed(1000 * seed + whole.rank)
    cut = len(data) * 9 // 10
    for step in range(steps):
        tokens, labels = _samples(data, torch.randint(cut - CONTEXT, (BATCH,), generator=order))
        store.begin_step()
        store.on_last_forward(0)
        (F.cross_entropy(model(tokens), labels) / mesh.size("data")).backward()
        store.on_last_backward(0)
        store.finish()
        optimizer.step(LEARNING_RATES[rule] * min(1.0, 2 * (steps - step) / steps))
        store.on_applied(())
        if rounds is not None:
            rounds.end_step(step, [float(BATCH)] * whole.size("replicate"))
        store.start_weight_gather()
    store.close()
    places = torch.linspace(cut, len(data) - CONTEXT - 1, _VALIDATED).long()
    with torch.no_grad():
        tokens, labels = _samples(data, places)
        return float(F.cross_entropy(model(tokens), labels))


def _optimizer(rule: Rule, store: BucketReducer, compression: CodecSpec | None) -> ShardOptimizer:
    groups = [OptimizerGroup(settings=GroupSettings(learning_rate_scale=1.0, weight_decay=0.0), names=())]
    if rule == "sgd":
        return SGD(store.shards, groups, momentum=MOMENTUM)
    is_frozen = compression is not None and compression.codec == "onebit"
    frozen_after = compression.onebit_warmup_steps if is_frozen else None
    return AdamW(store.shards, groups, betas=(MOMENTUM, 0.99), frozen_after=frozen_after)
