"""Decide the microbatch by a step on the real device, where a prediction of memory is too near the limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from weft.config.document import typed
from weft.config.plan import ModelFacts, Plan, dump_plan
from weft.config.recipe import Recipe, dump_recipe
from weft.errors import PlanError
from weft.formatting import format_memory
from weft.run.launch import RankInfo
from weft.run.launch.launcher import ForkServer, RankError, launch_function
from weft.verify.dry_run import PeakMemory

_KILLED = "SIGKILL"


MeasurePeak = Callable[[Recipe, Plan], PeakMemory]
"""Tries a plan on every rank; the peak is the largest of a rank, 0 where the system ended one before it could tell."""


def fit_microbatch(
    recipe: Recipe, plan: Plan, log: Callable[[str], None], measure_peak: MeasurePeak, *, facts: ModelFacts
) -> tuple[Plan, str]:
    """Return the plan with the largest microbatch whose step finds memory, and the reason of its size.

    The global batch stays: half the microbatch, twice as many.  With `measure_peak_in_job` call it on every rank.

    Raises:
        PlanError: not even a microbatch of one sample fits, or batch statistics forbid a smaller one.
    """
    refused: list[int] = []
    while True:
        log(f"memory    trying a microbatch of {plan.microbatch.size}")
        trial = measure_peak(recipe, plan)
        if trial.fits:
            reason = f"tried: a step peaks at {format_memory(trial.peak_bytes)} per process"
            return plan, reason + (f"; {refused[-1]} finds no memory" if refused else "")
        refused.append(plan.microbatch.size)
        smaller = None if facts.has_batch_norm else plan.microbatch.smaller()
        if smaller is None:
            memory = (
                f"{format_memory(trial.peak_bytes)} were held then"
                if trial.peak_bytes
                else "the system ended a process"
            )
            raise PlanError(
                f"A step with a microbatch of {plan.microbatch.size} finds no memory ({memory}), and it cannot be made"
                ' smaller. Free memory on the device, or give a plan that needs less: plan.memory.recompute = "full",'
                " or a higher plan.data_parallel.zero."
            )
        plan = replace(plan, microbatch=smaller)  # the same global batch


def measure_peak_in_processes(recipe: Recipe, plan: Plan, *, fork_server: ForkServer | None = None) -> PeakMemory:
    """Try a plan in fresh processes of this machine, one per rank, all at once."""
    count = plan.mesh.world_size
    return _launched(recipe, plan, count, {"rank": None, "local_rank": None}, fork_server)


def measure_peak_in_job(rank_info: RankInfo) -> MeasurePeak:
    """Try a plan from inside a running job: every rank starts one process, and all ranks agree on what came of it.

    The returned function is collective over the default group.
    """

    def measure_peak(recipe: Recipe, plan: Plan) -> PeakMemory:
        own = _launched(recipe, plan, 1, {"rank": rank_info.rank, "local_rank": rank_info.local_rank})
        worst = torch.tensor([float(not own.fits), float(own.peak_bytes)], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        return PeakMemory(fits=worst[0].item() == 0, peak_bytes=int(worst[1].item()))

    return measure_peak


def _launched(
    recipe: Recipe, plan: Plan, count: int, who: Mapping[str, int | None], fork_server: ForkServer | None = None
) -> PeakMemory:
    arguments = {
        "recipe": dump_recipe(recipe, everything=True),
        "plan": dump_plan(plan, everything=True),
        **who,
    }
    threads = plan.compute.num_threads
    try:
        function = "weft.verify.dry_run._peak_memory_rank:run_rank"
        results = launch_function(function, arguments, count, threads_per_rank=threads, fork_server=fork_server)
    except RankError as problem:
        if problem.kind != _KILLED:
            raise
        return PeakMemory(fits=False, peak_bytes=0)
    peaks = [typed(PeakMemory, peak) for peak in results]
    return PeakMemory(fits=all(peak.fits for peak in peaks), peak_bytes=max(peak.peak_bytes for peak in peaks))
