"""A few steps of a plan on made-up samples, timed, in fresh processes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import Mesh, peak_memory_bytes
from weft.describe import build_blueprint
from weft.engine import create_training, learning_rate
from weft.launch import Place, initialise_distributed, launch_function
from weft.plan import Plan, dump_plan, parse_plan
from weft.prove import TrialData
from weft.recipe import Recipe, dump_recipe, parse_recipe
from weft.record import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """What a few steps of a plan took."""

    seconds: tuple[float, ...]
    """Of each timed step, until the last rank had finished it."""
    first_seconds: float
    """Of the first step of all, which compiles and opens connections."""
    peak_bytes: int
    """The largest peak of a rank: allocated on an accelerator, resident on cores."""

    @property
    def best_seconds(self) -> float:
        """The shortest step: what the plan takes where other work on the machine does not disturb it."""
        return min(self.seconds)


def time_plan(recipe: Recipe, plan: Plan, *, warmup: int = 1, steps: int = 3) -> TimedPlan:
    """Run `warmup` + `steps` steps under a plan and time the latter.  The ranks end with the call.

    Raises:
        WeftError: a rank's own error, or the death of one.
    """
    arguments = {
        "recipe": dump_recipe(recipe, everything=True),
        "plan": dump_plan(plan, everything=True),
        "steps": warmup + steps,
    }
    threads = plan.compute.threads_per_rank
    found = launch_function("weft.entry._timed:run_rank", arguments, plan.mesh.world_size, threads_per_rank=threads)
    seconds = zip(*(rank["seconds"] for rank in found), strict=True)
    steps_seconds = [max(step) for step in seconds]
    return TimedPlan(
        seconds=tuple(steps_seconds[warmup:]),
        first_seconds=steps_seconds[0],
        peak_bytes=max(rank["peak_bytes"] for rank in found),
    )


def run_rank(place: Place, *, recipe: str, plan: str, steps: int) -> dict[str, Any]:
    """What each rank does; `recipe` and `plan` are TOML.  Returns seconds per step and the peak of memory."""
    what, how = parse_recipe(recipe), parse_plan(plan)
    torch.set_num_threads(how.compute.threads_per_rank)
    seconds: list[float] = []
    with initialise_distributed(how.compute.device, place) as distributed:
        mesh = Mesh(how.mesh, distributed.device)
        blueprint = build_blueprint(what)
        training = create_training(what, how, blueprint, mesh, Recorder())
        label_range = getattr(what.model.shape, "num_classes", None)
        data = TrialData(blueprint, how, data_index=mesh.index("data"), seed=what.run.seed, label_range=label_range)
        for step in range(steps):
            batches = data.microbatches(step)
            if distributed.world_size > 1:
                dist.barrier()
            began = time.perf_counter()
            training.stepper(batches, step=step, learning_rate=learning_rate(what, step))
            if distributed.device.type != "cpu":
                torch.accelerator.synchronize(distributed.device)
            seconds.append(time.perf_counter() - began)
        training.close()
        return {"seconds": seconds, "peak_bytes": peak_memory_bytes(distributed.device)}
