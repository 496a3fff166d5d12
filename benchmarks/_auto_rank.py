"""One rank that runs many plans in turn: what `benchmarks.auto` launches."""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import Mesh, peak_memory_bytes
from weft.describe import build_blueprint
from weft.engine import create_training, learning_rate
from weft.errors import WeftError
from weft.launch import Place, initialise_distributed
from weft.plan import Plan, parse_plan
from weft.prove import TrialData
from weft.recipe import Recipe, parse_recipe
from weft.record import Recorder

_WARMUP, _STEPS, _KEPT = 2, 4, 3


class Running:
    """A plan that has been built on this rank, and runs step by step."""

    def __init__(self, recipe: Recipe, plan: Plan, device: torch.device) -> None:
        self._recipe, self._plan = recipe, plan
        torch.set_num_threads(plan.compute.threads_per_rank)
        mesh = Mesh(plan.mesh, device)
        blueprint = build_blueprint(recipe)
        self._training = create_training(recipe, plan, blueprint, mesh, Recorder())
        label_range = getattr(recipe.model.shape, "num_classes", None)
        self._data = TrialData(
            blueprint, plan, data_index=mesh.index("data"), seed=recipe.run.seed, label_range=label_range
        )
        self._step = 0

    def step(self) -> float:
        """Take a step that all ranks begin together; its seconds here."""
        torch.set_num_threads(self._plan.compute.threads_per_rank)
        batches = self._data.microbatches(self._step)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        began = time.perf_counter()
        self._training.stepper(batches, step=self._step, learning_rate=learning_rate(self._recipe, self._step))
        self._step += 1
        return time.perf_counter() - began


def run_rank(place: Place, *, recipe: str, plans: list[str], rounds: int) -> dict[str, Any]:
    """Run every plan for a few steps; then the first plan and the fastest ones again, in turn, `rounds` times.

    The first plan is the choice, which also runs first of all, so that the peak of memory is its own.
    """
    what, known = parse_recipe(recipe), [parse_plan(text) for text in plans]
    first: dict[int, float] = {}
    failures: dict[int, str] = {}
    peak = 0
    with initialise_distributed("cpu", place) as distributed:
        for at, plan in enumerate(known):
            try:
                running = Running(what, plan, distributed.device)
                seconds = [running.step() for _ in range(_WARMUP + _STEPS)][_WARMUP:]
                first[at] = median(seconds)
                del running
            except WeftError as problem:  # refused alike on every rank
                failures[at] = str(problem).splitlines()[0]
            peak = peak or peak_memory_bytes(distributed.device)
            gc.collect()
        again = _again(what, known, _kept(first), rounds, distributed.device) if 0 in first else {}
    return {"first": first, "again": again, "failures": failures, "peak_bytes": peak}


def _kept(first: dict[int, float]) -> list[int]:
    """The choice and the fastest, as the slowest rank saw them: the same on every rank."""
    order = sorted(first)
    slowest = torch.tensor([first[at] for at in order])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ranked = sorted(zip(slowest.tolist(), order, strict=True))
    return list(dict.fromkeys([0, *(at for _, at in ranked[:_KEPT])]))


def _again(
    recipe: Recipe, plans: list[Plan], kept: list[int], rounds: int, device: torch.device
) -> dict[int, list[float]]:
    """Seconds per round of each kept plan; the order is turned round from round to round."""
    running = {at: Running(recipe, plans[at], device) for at in kept}
    found: dict[int, list[float]] = {at: [] for at in kept}
    for number in range(1 + rounds):
        for at in kept if number % 2 == 0 else reversed(kept):
            seconds = running[at].step()
            if number > 0:
                found[at].append(seconds)
    return found
