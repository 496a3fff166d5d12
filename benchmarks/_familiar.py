"""One training loop, plain, under DDP and under a session: what a person writes who changes as little as can be."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import weft
from benchmarks._llama import world_size
from benchmarks._nets import data_of, model_of

Step = Callable[[int], float]


def plain(settings: Mapping[str, Any]) -> Step:
    """One process."""
    model = model_of(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = _endless(data_of(settings))

    def step(index: int) -> float:
        del index
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def ddp(settings: Mapping[str, Any]) -> Step:
    """DDP over Gloo with its own options, each rank half of a batch."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model_of(settings), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = data_of(settings)
    sampler = DistributedSampler(data.dataset, drop_last=True)
    batches = _endless(DataLoader(data.dataset, batch_size=int(settings["batch"]) // world_size(), sampler=sampler))

    def step(index: int) -> float:
        del index
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def session(settings: Mapping[str, Any]) -> Step:
    """The same loop under a session that replicates; `backend`: what carries gradients between ranks."""
    settings_of_plan = {
        "data_parallel.zero": 0,
        "compute.backend": settings.get("backend", "auto"),
        "compute.threads_per_rank": 1,
    }
    live = weft.session(record=False, folder=tempfile.mkdtemp(), quiet=True, settings=settings_of_plan)
    model = model_of(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer, loader = live.prepare(model, optimizer, data_of(settings))
    batches = _endless(loader)

    def step(index: int) -> float:
        del index
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        live.backward(loss, is_last=bool(settings.get("is_last")))
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def accelerator(settings: Mapping[str, Any]) -> Step:
    """The same loop written for Accelerate, on Weft."""
    from weft.accelerate import Accelerator

    held = Accelerator(cpu=True)
    model = model_of(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer, loader = held.prepare(model, optimizer, data_of(settings))
    batches = _endless(loader)

    def step(index: int) -> float:
        del index
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        held.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _endless(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader
