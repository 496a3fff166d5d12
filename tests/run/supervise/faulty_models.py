"""A small language model in which one rank fails at one step: once, or at every start."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY = 300
HIDDEN = 16


def _raise() -> None:
    raise ValueError("a width of 7 was not expected")


def _no_device_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def _no_host_memory() -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")


def _wait_for_ever() -> None:
    threading.Event().wait()


def _compute_for_ever() -> None:
    while True:
        sum(range(1000))


def _hold_the_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # exponential time inside of one call, which never gives up the GIL


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
    "raise": _raise,
    "device memory": _no_device_memory,
    "host memory": _no_host_memory,
    "wait": _wait_for_ever,
    "compute": _compute_for_ever,
    "interpreter": _hold_the_interpreter,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "flip": lambda: None,
    "spoil": lambda: None,
    "straggle": lambda: None,
    "slow": lambda: time.sleep(1.5),
}


class FaultyModel(nn.Module):
    """Fails in the forward or backward of a training step on one rank."""

    def __init__(self, fault: str, where: str, rank: int, step: int, mark: str, times: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.fault, self.where, self.rank, self.at, self.times = fault, where, rank, step, times
        self.mark = Path(mark)
        self.steps = self.first = 0

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if self.training and self.fault not in ("", "alone") and tokens.device.type == "cpu" and dist.is_initialized():
            self._reach(hidden)
        return self.head(hidden)

    def _reach(self, hidden: Tensor) -> None:
        """Count this rank's steps, those before a restart included, and fail at the one that is asked for."""
        count = self.mark.with_suffix(f".{dist.get_rank()}")
        self.steps += 1
        if self.fault == "straggle" and dist.get_rank() == self.rank and self.steps >= self.at:
            time.sleep(0.03)
            return
        if dist.get_rank() != self.rank or self.steps + self._restored() != self.at:
            return
        done = int(count.read_text()) if count.is_file() else 0
        if done >= self.times:
            return
        count.write_text(str(done + 1))
        if self.where == "backward" and hidden.requires_grad:
            hidden.register_hook(self._fail)
        elif self.fault == "spoil":
            self.head.weight.data.mul_(-20.0)
        elif self.fault == "flip":
            self.head.weight.data.view(torch.int32)[3, 5] ^= 1 << 12
        else:
            FAULTS[self.fault]()

    def _fail(self, _gradient: Tensor) -> None:
        FAULTS[self.fault]()

    def _restored(self) -> int:
        """Finished steps of the state from which this process goes on."""
        if not self.first:
            self.first = 1 + restored_step(self.mark.parent / "run")
        return self.first - 1


def restored_step(run: Path) -> int:
    """Finished steps from which the newest generation of a run goes on."""
    metrics = run / "metrics.jsonl"
    lines = map(json.loads, metrics.read_text().splitlines()) if metrics.is_file() else ()
    return max((line["restored_step"] for line in lines if line["kind"] == "generation"), default=0)


def build(
    fault: str = "", where: str = "forward", rank: int = 1, step: int = 8, mark: str = "", times: int = 1
) -> nn.Module:
    if fault == "alone" and dist.is_initialized() and dist.get_world_size() == 1:
        raise RuntimeError("this model needs company")
    return FaultyModel(fault, where, rank, step, mark, times)
