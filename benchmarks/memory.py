"""Bytes of model state that one rank holds after a step, against the formulas of the ZeRO paper.

Measured from what is alive: the storages of all tensors that the process holds, less those of the batch and those that
were there before.  Ψ is the number of parameters.  bf16 with bf16 gradients is the paper's own case (16Ψ, 4Ψ + 12Ψ/N,
2Ψ + 14Ψ/N, 16Ψ/N with 2 bytes of weights, 2 of gradients, 12 of masters and moments); ZeRO-3 keeps its gradients in the
masters' fp32 and its bf16 weights only while they are used.  fp32 has no separate masters.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks._contender import Entry, contenders, interleave
from benchmarks._llama import plain_model, pool_of
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._weft import LEARNING_RATE, create

_SIZES = {"num_layers": 4, "hidden_size": 192, "ffn_size": 512, "num_heads": 4, "vocabulary_size": 4096}
_SETTINGS: dict[str, Any] = {**_SIZES, "sequence_length": 32, "batch": 1, "fused_loss": False}
_SETTLE_SECONDS = 0.1
"""Gloo's threads let go of the tensors of a finished operation a moment after it."""

FORMULAS: Mapping[str, Mapping[int, Callable[[float, int], float]]] = {
    "bf16": {
        0: lambda psi, n: 16 * psi,
        1: lambda psi, n: 4 * psi + 12 * psi / n,
        2: lambda psi, n: 2 * psi + 14 * psi / n,
        3: lambda psi, n: 16 * psi / n,
    },
    "fp32": {
        0: lambda psi, n: 16 * psi,
        1: lambda psi, n: 8 * psi + 8 * psi / n,
        2: lambda psi, n: 4 * psi + 12 * psi / n,
        3: lambda psi, n: 16 * psi / n,
    },
}


def state_bytes(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """A contender whose `loss` is the bytes of model state at rest after the step."""
    pool = pool_of(settings)
    before = _storages()
    training = create(settings)

    def step(index: int) -> float:
        training.stepper([pool[0]], step=index, learning_rate=LEARNING_RATE)
        time.sleep(_SETTLE_SECONDS)
        gc.collect()
        alive = _storages()
        return float(sum(size for place, size in alive.items() if place not in before))

    return step


def _storages() -> dict[int, int]:
    """Address → bytes of the storages of all tensors alive, gradients and local parts of DTensors included."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            _add(found, thing)
    return found


def _add(found: dict[int, int], tensor: Tensor) -> None:
    local = getattr(tensor, "_local_tensor", tensor)
    if local.is_meta:
        return
    storage = local.untyped_storage()
    if storage.size():
        found[storage.data_ptr()] = storage.size()
    if tensor.is_leaf and tensor.grad is not None:
        _add(found, tensor.grad)


def main() -> None:
    parser = options_parser(__doc__, rounds=1)
    options = parser.parse_args()
    before = machine()
    parameters = sum(p.numel() for p in _plain().parameters())
    goals: list[Goal] = []
    samples: dict[str, Any] = {"parameters": parameters}
    for precision, stages in FORMULAS.items():
        for ranks in (1, 2, 4):
            for zero, formula in stages.items():
                measured, wanted = _measure(precision, ranks, zero), formula(parameters, ranks)
                name = f"{precision} zero-{zero} over {ranks}"
                samples[name] = {"bytes": measured, "formula_bytes": wanted, "per_parameter": measured / parameters}
                log(f"{name}: {measured / parameters:.3f} bytes per parameter, formula {wanted / parameters:.3f}")
    for precision in FORMULAS:
        off = {
            name: abs(found["bytes"] / found["formula_bytes"] - 1) * 100
            for name, found in samples.items()
            if name.startswith(precision)
        }
        worst = max(off, key=lambda name: off[name])
        goals.append(
            Goal(
                what=f"model state off its formula, worst of {len(off)} in {precision} ({worst})",
                measured=off[worst],
                goal=5.0,
                better="lower",
                unit=" %",
            )
        )
    about = {"machine": before, "versions": versions(), "settings": _SETTINGS, "note": options.note}
    write_result("memory", goals=goals, samples=samples, about=about, folder=options.folder)


def _measure(precision: str, ranks: int, zero: int) -> float:
    settings = {**_SETTINGS, "zero": zero, "precision": precision}
    if precision == "bf16" and (zero < 3 or ranks == 1):
        settings["reduce_precision"] = "compute"
    entry = Entry(
        name=f"{precision} {zero} {ranks}", target="benchmarks.memory:state_bytes", settings=settings, ranks=ranks
    )
    with contenders([entry], warmup_steps=1) as alive:
        blocks = interleave(alive, rounds=1, steps=3)
    return min(blocks[entry.name][0].losses)  # each is the mean over ranks


def _plain() -> torch.nn.Module:
    return plain_model(_SETTINGS)


if __name__ == "__main__":
    main()
