"""The phases of the suite for GPUs, on any device and at any size."""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_parity
import gpu_throughput
from gpu_attention import attention_seconds, attention_verdicts
from gpu_offload import offload_verdicts
from gpu_parity import Cells, Verdict
from gpu_report import Report
from pool import RankPool

from weft.api import train
from weft.run.launch.launcher import launch_function
from weft.verify.numerics import TOLERANCES

Say = Callable[[str], None]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def one_process_verdicts(
    cells: Cells, models: Sequence[str] = tuple(gpu_parity.MODELS), precisions: Sequence[str] = ("fp64", "fp32", "bf16")
) -> Iterator[Verdict]:
    """One process on the device against one on the CPU: the same initial weights, the same gradients and losses."""
    for model in models:
        for precision in precisions:
            yield cells.same_weights(model, precision)
            yield from cells.against_cpu(model, precision)


def rank_verdicts(cells: Cells, names: Sequence[str] = tuple(gpu_parity.PLANS)) -> Iterator[Verdict]:
    """Several ranks on one device against one process on it: in fp64, and where a device has kernels of its own for
    halves, in bf16."""
    for precision in ("fp64", "bf16"):
        for name in names:
            if precision == "bf16" and name not in gpu_parity.HALVES:
                continue
            try:
                found = cells.against_one(name, precision)
            except Exception as problem:  # of one cell, and the next ones run
                found = [Verdict(f"{precision}, {name}: {type(problem).__name__}", math.inf, 0.0, str(problem))]
            yield from found


def way_in_verdicts(device: str, processes: int = 2) -> Iterator[Verdict]:
    """`weft.train` with several ranks on one device: launcher, data, checkpoints, export; losses of one process."""
    recipe = gpu_parity.recipe_of("decoder", "fp64")
    recipe = replace(recipe, run=replace(recipe.run, steps=4, save_every=2))
    losses: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        for ranks in (1, processes):
            plan = gpu_parity.plan_of(shard=ranks, zero=1 if ranks > 1 else 0, device=device)
            losses.append(train(recipe, plan, folder=Path(folder) / f"run-{ranks}", quiet=True).losses)
    farthest = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    yield Verdict(f"weft.train, {processes} ranks: losses", farthest, TOLERANCES["fp64"])


def attention(report: Report, device: str, **sizes: int) -> dict[str, Any]:
    """Whether attention in parts is right, and what it takes beside torch's; see `attention_seconds`."""
    found = judged(report, attention_verdicts(device))
    seconds = attention_seconds(device, **sizes)
    for name, taken in seconds.items():
        say(f"     {name:26s} {statistics.median(taken) * 1e3:8.2f} ms")
    return found | {"seconds": seconds}


def throughput(report: Report, device: str, **settings: Any) -> dict[str, Any]:
    """See `gpu_throughput.measure`."""
    arguments: dict[str, Any] = {
        "device": device,
        "sizes": gpu_throughput.ONE_BILLION,
        "batch": 8,
        "precision": "bf16",
        "compiled": True,
        "warmup": 4,
        "rounds": 6,
        "steps": 5,
    }
    found: dict[str, Any] = _on_one_rank("measure", arguments | settings)
    for name, contender in found["contenders"].items():
        say(
            f"     {name:26s} {contender['median_seconds'] * 1e3:8.1f} ms"
            f"  {contender['tokens_per_second']:10,.0f} tokens/s"
            f"  {contender['share_of_measured_peak']:6.1%} of peak  {contender['peak_bytes'] / 2**30:6.1f} GiB"
        )
    for name, kernels in found["kernels"].items():
        say(f"     {name:26s} device busy {kernels['busy']:7.1f} ms a step, idle {kernels['idle']:6.1f}")
        for kernel, times, taken in kernels["kernels"][:25]:
            say(f"       {taken:7.2f} ms  {times:6.1f} x  {kernel}")
    losses = [contender["first_losses"][0] for contender in found["contenders"].values()]
    if max(losses) - min(losses) > 0.02 * min(losses):
        report.failures.append(f"throughput: first losses differ between contenders: {losses}")
    return found


def memory(report: Report, device: str, **settings: Any) -> list[dict[str, Any]]:
    """See `gpu_throughput.measure_memory`.  States are exact, so they are judged; the estimate of the rest is kept."""
    arguments: dict[str, Any] = {
        "device": device,
        "sizes": gpu_throughput.ONE_BILLION | {"num_layers": 4},
        "batch": 8,
        "precision": "bf16",
        "recomputes": ["none", "selective", "full"],
    }
    found: list[dict[str, Any]] = _on_one_rank("measure_memory", arguments | settings)
    for entry in found:
        states = entry["measured_states_bytes"] / entry["predicted_states_bytes"]
        say(
            f"     recompute {entry['recompute']:10s} predicted {entry['predicted_bytes'] / 2**30:7.2f} GiB, measured"
            f" {entry['measured_bytes'] / 2**30:7.2f} GiB; states {states:.3f} of predicted"
        )
        if not math.isclose(states, 1.0, rel_tol=0.05):
            report.failures.append(f"memory, recompute {entry['recompute']}: states are {states:.3f} of predicted")
    return found


def offload(report: Report, device: str, **settings: Any) -> dict[str, Any]:
    """See `offload_verdicts`."""
    kept: dict[str, Any] = {}
    found = judged(report, offload_verdicts(device, kept, **settings))
    for name, entry in kept.items():
        say(f"     {name:26s} {entry['step_seconds'] * 1e3:8.1f} ms  {entry['peak_bytes'] / 2**30:6.2f} GiB")
    return found | {"measured": kept}


def collectives(report: Report, device: str) -> dict[str, bool]:
    """See `gpu_throughput.collectives`."""
    found: dict[str, bool] = _on_one_rank("collectives", {"device": device})
    report.failures += [f"{name} on {device}'s own backend is wrong" for name, right in found.items() if not right]
    return found


def judged(report: Report, verdicts: Iterator[Verdict], told: Say = say) -> dict[str, Any]:
    """Run a phase of verdicts while time is left; a cell that raises fails, and the next one runs."""
    found: list[dict[str, Any]] = []
    while report.seconds_left > 0:
        try:
            verdict = next(verdicts, None)
        except Exception as problem:  # the day is short: tell, and let the other phases run
            report.failures.append(f"{type(problem).__name__}: {problem}")
            told(f"FAIL {type(problem).__name__}: {problem}")
            break
        if verdict is None:
            break
        told(f"{verdict}")
        found.append({"what": verdict.what, "difference": verdict.difference, "limit": verdict.limit})
        if not verdict.passed:
            report.failures.append(str(verdict))
    else:
        told("out of time: the rest of this phase was left out")
    return {"verdicts": found}


def run_all(report: Report, device: str, phases: Sequence[str]) -> Report:
    """Run the phases asked for, in order, each kept as it ends."""
    ranks = RankPool(8, ["default"])  # a new warning on a new device is to be read, not to end the day
    cells = Cells(ranks, device)
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "collectives": lambda: collectives(report, device),
        "attention": lambda: attention(report, device),
        "one process": lambda: judged(report, one_process_verdicts(cells)),
        "throughput": lambda: throughput(report, device),
        "memory": lambda: {"settings": memory(report, device)},
        "offload": lambda: offload(report, device),
        "ranks": lambda: judged(report, rank_verdicts(cells)),
        "way in": lambda: judged(report, way_in_verdicts(device)),
    }
    try:
        for phase in phases:
            if report.seconds_left <= 0:
                report.failures.append(f"{phase}: left out, out of time")
                continue
            say(f"── {phase}")
            started = time.monotonic()
            try:
                results = work[phase]()
            except Exception as problem:
                report.failures.append(f"{phase}: {type(problem).__name__}: {problem}")
                say(f"FAIL {phase}: {type(problem).__name__}: {problem}")
                results = {}
            report.add(phase, results, time.monotonic() - started)
    finally:
        ranks.close()
    return report


PHASES = ("collectives", "attention", "one process", "throughput", "memory", "offload", "ranks", "way in")


def _on_one_rank(function: str, arguments: dict[str, Any]) -> Any:
    return launch_function(f"gpu_throughput:{function}", arguments, 1)[0]
