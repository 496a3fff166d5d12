"""Let one rank of a world take a step on its real device without its peers, to see what memory that takes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from weft.comm.device import peak_memory_bytes
from weft.comm.fake import fake_world
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import Plan, axis_coordinates
from weft.config.recipe import Recipe
from weft.model.blueprint import Blueprint
from weft.run.engine import create_training
from weft.techniques.pipeline.runner import PipelineRunner
from weft.verify.dry_run._agree import rank_at
from weft.verify.dry_run._dry_run import (
    ActivationShape,
    dry_run_rank,
    example_batch,
    microbatch_counts,
    prepare_device_mesh,
)

_CPU_RESERVE_BYTES, _ACCELERATOR_RESERVE_BYTES = 2**28, 2**30
"""Memory kept free for what a lone rank lacks: communicators with their buffers, and streams or data workers."""
_REFUSALS = ("can't allocate memory", "not enough memory", "out of memory")
"""Messages of torch's allocators of the host's memory, pinned or not, which raise a plain RuntimeError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Memory of a rank's step."""

    fits: bool
    """Whether every allocation was granted."""
    peak_bytes: int
    """Most memory that was held, until the refusal where one came: allocated on an accelerator with what is kept free
    for communication, resident on cores."""


def measure_peak_memory(
    recipe: Recipe, plan: Plan, build: Callable[[], Blueprint], rank: int, device: torch.device
) -> PeakMemory:
    """Build `rank`'s share of a plan on `device` and take one step; a refused allocation is an answer, no error.

    Not collective, and peers need not be there: collectives go nowhere and leave their buffers as they are, so the step
    computes nonsense at its real size.  Call it in a process that has joined no group and ends afterwards, because an
    accelerator's context and what the allocator has cached stay until then.  As many microbatches run as there can be
    in flight.

    Args:
        build: the blueprint, which must bring an example batch; called in here.

    Raises:
        PlanError: what building the plan's rank refuses.
    """
    _prefer_this_process_when_memory_ends()
    plan = replace(plan, compute=replace(plan.compute, compile=False))
    activation = _activation(recipe, plan, build, rank)
    try:
        with fake_world(rank, plan.mesh.world_size), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a rank alone; what is worth hearing comes again when the run starts
            free = _CPU_RESERVE_BYTES if device.type == "cpu" else _ACCELERATOR_RESERVE_BYTES
            # Taken first, so that the step runs into the limit as early as it would with communicators beside it.
            reserved = torch.empty(free, dtype=torch.uint8, device=device)
            _step(recipe, plan, build, device, activation)
            del reserved
    except torch.OutOfMemoryError:
        return PeakMemory(fits=False, peak_bytes=peak_memory_bytes(device))
    except RuntimeError as problem:
        if not any(refusal in str(problem) for refusal in _REFUSALS):
            raise
        return PeakMemory(fits=False, peak_bytes=peak_memory_bytes(device))
    return PeakMemory(fits=True, peak_bytes=peak_memory_bytes(device))


def _step(
    recipe: Recipe,
    plan: Plan,
    build: Callable[[], Blueprint],
    device: torch.device,
    activation: ActivationShape | None,
) -> None:
    mesh = Mesh(plan.mesh, device, alone=True)
    prepare_device_mesh(plan, mesh)
    blueprint = build()
    training = create_training(recipe, plan, blueprint, mesh, Recorder())
    runner = training.model.runner
    if isinstance(runner, PipelineRunner):
        runner.assume(activation)
    # As many microbatches as are ever in flight: further ones find the memory of earlier ones free.
    count = microbatch_counts(plan, mesh.rank)[2][-1]
    training.stepper([example_batch(blueprint, plan)] * count, step=0, learning_rate=0.0)


def _activation(recipe: Recipe, plan: Plan, build: Callable[[], Blueprint], rank: int) -> ActivationShape | None:
    """Return the shape that stages pass on, by a dry run of the first stage: a later one cannot know it by itself."""
    if plan.mesh.pipeline == 1:
        return None
    first = rank_at(plan.mesh, {**axis_coordinates(plan.mesh, rank), "pipeline": 0})
    return dry_run_rank(recipe, plan, build, first).activation


def _prefer_this_process_when_memory_ends() -> None:
    """Make Linux end this process first if the host runs out of memory: it is an attempt, and nobody's work."""
    with suppress(OSError):
        Path(f"/proc/{os.getpid()}/oom_score_adj").write_text("1000")
