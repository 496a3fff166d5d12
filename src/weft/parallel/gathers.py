"""Ranks that do not gather the same blocks under ZeRO-3, because their samples take other ways through the model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from weft.comm import Mesh
from weft.errors import CollectiveError
from weft.parallel._context import StepContext
from weft.parallel.ways import Ways, ways_differ

_ROOT = "what stands before its blocks"


def note_gathers(context: StepContext, root: nn.Module, blocks: Sequence[str], mesh: Mesh, *, hold: bool) -> None:
    """From now on know which block a forward has come to, before its weights are gathered; call behind `fully_shard`.

    Where ranks hold what they have gathered, the numbers of their forwards may differ, and their ways are not compared.
    """
    present = dict(root.named_modules())
    units = {name: present[name] for name in blocks if name in present}
    view = mesh["data"]
    if view.group is not None and not hold and dist.get_backend(view.group) != "fake":
        ways = context.ways = Ways([*units], view)
        root.register_forward_pre_hook(ways.begin, prepend=True)
        root.register_forward_hook(ways.end)
    root.register_forward_pre_hook(partial(_note, context, _ROOT), prepend=True)
    for name, unit in units.items():
        unit.register_forward_pre_hook(partial(_note, context, name), prepend=True)


def _note(context: StepContext, name: str, unit: nn.Module, args: Any) -> None:
    context.gathers = name
    if context.ways is not None and name != _ROOT:
        context.ways.come_to(name)


@contextmanager
def gathering_alike(context: StepContext) -> Generator[None]:
    """Say what it means where ranks of a step call their group differently under ZeRO-3.

    Raises:
        PlanError: in place of the group's `CollectiveError`.
    """
    try:
        yield
    except CollectiveError as error:
        if not context.gathers or "does not fit" not in str(error):
            raise
        raise ways_differ(f"this rank's forward came to {context.gathers} last") from error
