"""`torch.compile` of each block in place: one graph serves all blocks of a kind, and names stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.config.plan import Plan
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.techniques.core import StepContext, is_own
from weft.techniques.randomness.keyed_dropout import KeyedDropout


def apply_compile(
    part: nn.Module, blueprint: Blueprint, plan: Plan, context: StepContext, *, backend: str = "inductor"
) -> None:
    """Compile the blocks of `part` when `plan.compute.compile` says so; without a cut table the whole part.

    Compilation happens at the first forward.  Do it last of all that changes a block's forward, and before
    `fully_shard`.

    Raises:
        PlanError: a pipeline schedule that splits the backward, which compiled blocks cannot do.
    """
    if not plan.compute.compile:
        return
    pipeline = plan.pipeline_parallel
    if plan.mesh.pipeline > 1 and pipeline.splits_backward:
        raise PlanError(
            f"plan.compute.compile = true does not go with {pipeline.schedule_setting}: it takes input and weight"
            ' gradients in separate passes, and a compiled block has only one. Use "1f1b" or "interleaved_1f1b", or'
            " compile = false."
        )
    names = [] if blueprint.cut is None else [name for name in blueprint.cut.blocks if is_own(part, blueprint, name)]
    compiled = {name: part.get_submodule(name) for name in names or [""]}
    dropouts = {name: _dropouts(module) for name, module in compiled.items()}
    if plan.memory.recompute != "none" or any(dropouts.values()):
        # Dropouts count their calls, and recomputation puts the microbatch's keys into the context and takes them out
        # again, which Dynamo calls an unsafe side effect: it would run the block eagerly.  Nothing is lost where
        # backward does not repeat it: what reads the keys has them as inputs of its graph.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # pyright: ignore[reportPrivateUsage]
    for name, module in compiled.items():
        number_calls(module)
        module.compile(backend=backend, options=_options(plan) if backend == "inductor" else None)
        whole: Any = module
        if plan.compute.precision in ("bf16", "fp16"):
            whole._compiled_call_impl = partial(_hiding, tuple(module.parameters()), whole._compiled_call_impl)
        if dropouts[name]:
            whole._compiled_call_impl = partial(_called_once, name, context, module, whole._compiled_call_impl)


def number_calls(module: nn.Module) -> None:
    """Let the dropouts of a module number their calls from 0 in each run of its forward: compiled code knows nothing of
    earlier ones."""
    if dropouts := _dropouts(module):
        module.forward = partial(_counting_anew, dropouts, module.forward)


def _dropouts(module: nn.Module) -> tuple[KeyedDropout, ...]:
    return tuple(inner for inner in module.modules() if isinstance(inner, KeyedDropout) and inner.p > 0)


def _counting_anew(dropouts: Sequence[KeyedDropout], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for dropout in dropouts:
        dropout.compiled_calls = 0
    return forward(*args, **kwargs)


def _hiding(parameters: Sequence[nn.Parameter], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a compiled forward while no parameter shows a gradient of another dtype than its own.

    Dynamo breaks the graph at each such parameter, without a word: with gradients in fp32 a block in bf16 fell into
    graphs of one or two operators, and nothing was fused across them (torch 2.11 and 2.13, 2026-11).
    """
    hidden = [
        (weight, weight.grad) for weight in parameters if weight.grad is not None and weight.grad.dtype != weight.dtype
    ]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        return call(*args, **kwargs)
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient


def _called_once(
    name: str, context: StepContext, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if module.training and context.current is not None and context.current.calls.take(f"block {name}") > 0:
        raise PlanError(
            f"plan.compute.compile = true, but {name or 'the model'} is called more than once in a forward, and it"
            " drops elements: compiled code would drop the same ones in each call. Use compile = false."
        )
    return call(*args, **kwargs)


def _options(plan: Plan) -> dict[str, Any]:
    """Inductor puts operators that do not wait for one another in an order by their sizes, which differ between ranks
    that share tokens unevenly.  Where blocks send, all ranks keep to the order of the graph: one exchanged what it
    computes again while another sent a gradient, and neither came to an end (2026-11-26)."""
    mesh = plan.mesh
    return {"reorder_for_peak_memory": False} if mesh.tensor * mesh.context > 1 else {}
