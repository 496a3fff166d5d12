"""A stage runs the model's whole forward, so what stands outside the table's modules runs on every stage: it must do
nothing.

A scale after the embedding or behind the head that the forward applies by itself would be applied once per stage,
silently. So the skeleton of the model, with every module of its table substituted, is run once on a random activation
and must return it bit for bit, in evaluation as in training, and in evaluation after that: a forward may count.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.model.blueprint import Blueprint, logits_of
from weft.model.families import CutTable
from weft.model.meta_forward.copied_calls import copied_model
from weft.model.positions import call_model
from weft.techniques.pipeline.cut import Absent, Passed, Received


class _Stop(Exception):
    """Ends a forward once the first block's input is known."""


def verify_cut_table(blueprint: Blueprint, table: CutTable) -> None:
    """Check that the model computes nothing between the modules of its cut table.  Not collective; holds no weights.

    A model without an example, or whose forward does not run on its own kind of device, is not checked, with a warning.

    Raises:
        PlanError: the forward changes the activation outside the table's modules.
    """
    kind = type(blueprint.module).__name__
    try:
        outputs = _through_skeleton(blueprint, table)
    except Exception as error:
        warnings.warn(
            f"whether {kind} may be cut by its table could not be tried ({type(error).__name__}: {error}). Compare its"
            " gradients under this plan with those of one process before you rely on them.",
            stacklevel=2,
        )
        return
    if outputs is None:
        warnings.warn(
            f"{kind} brings no example batch, so its cut table was not tried. Give its Blueprint an `example`, or"
            " compare gradients under this plan with those of one process.",
            stacklevel=2,
        )
        return
    sent, *results = outputs
    if other := [type(returned).__name__ for returned in results if not isinstance(returned, Tensor)]:
        raise PlanError(
            f"{kind} cannot be cut into stages by its table: its forward returns a {other[0]}, in which no stage knows"
            " the tensor to send on. Return the logits, or a tuple or an object with them (outputs.logits), or use"
            " plan.mesh.pipeline = 1."
        )
    if any(returned.shape != sent.shape or not torch.equal(returned, sent) for returned in results):
        raise PlanError(
            f"{kind} cannot be cut into stages by its table: its forward changes the activation outside"
            f" {table.entry}, the blocks and {', '.join(table.tail) or 'the tail'}, and every stage would do that"
            " again. Move"
            " that computation (a scale, an extra norm, a residual) into one of these modules or name its module in the"
            " table, or use plan.mesh.pipeline = 1."
        )


def _through_skeleton(blueprint: Blueprint, table: CutTable) -> list[Any] | None:
    """What went in where the first block stands, and what came out: in evaluation, in training, in evaluation."""
    if blueprint.example is None:
        return None
    shape, dtype = _first_block_input(blueprint, table)
    generator = torch.Generator().manual_seed(0)
    sent = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    entry = Received()
    entry.value = sent
    skeleton = _skeleton(blueprint.module, table, entry)
    inputs = _inputs(blueprint, torch.device("cpu"))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # a dropout outside of the table would draw
        return [sent, *(logits_of(call_model(skeleton.train(mode), inputs)) for mode in (False, True, False))]


def _skeleton(module: nn.Module, table: CutTable, entry: Received) -> nn.Module:
    substitutes: dict[str, nn.Module] = {table.entry: entry}
    substitutes |= {name: Absent() for name in table.stem_zero}
    substitutes |= {name: Passed() for name in (*table.stem_skip, *table.blocks, *table.tail)}
    memo = {id(module.get_submodule(name)): substitute for name, substitute in substitutes.items()}
    skeleton = copied_model(module, memo)
    if any(tensor.is_meta for tensor in (*skeleton.parameters(), *skeleton.buffers())):
        skeleton = skeleton.to_empty(device="cpu")
        for tensor in (*skeleton.parameters(), *skeleton.buffers()):
            tensor.detach().zero_()
    return skeleton


def _first_block_input(blueprint: Blueprint, table: CutTable) -> tuple[torch.Size, torch.dtype]:
    seen: list[Tensor] = []

    def stop(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen.append(args[0] if args else next(iter(kwargs.values())))
        raise _Stop

    module = blueprint.module
    handle = module.get_submodule(table.blocks[0]).register_forward_pre_hook(stop, with_kwargs=True)
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    training = module.training
    try:
        with torch.no_grad():
            call_model(module.eval(), _inputs(blueprint, device))
    except _Stop:
        pass
    finally:
        handle.remove()
        module.train(training)
    return seen[0].shape, seen[0].dtype


def _inputs(blueprint: Blueprint, device: torch.device) -> dict[str, Tensor]:
    """One sample of zeros by the forward's keywords."""
    assert blueprint.example is not None
    example = blueprint.example(1)
    return {
        keyword: torch.zeros(example[name].shape, dtype=example[name].dtype, device=device)
        for keyword, name in blueprint.inputs.items()
        if name in example
    }
