"""Ranks that do not gather the same blocks under ZeRO-3, because their samples take other ways through the model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from weft.errors import CollectiveError, PlanError
from weft.parallel._context import StepContext

_ROOT = "what stands before its blocks"


def note_gather(context: StepContext, name: str, unit: nn.Module, args: Any) -> None:
    """A hook before the forward of what ZeRO-3 gathers together: of the root its name is empty."""
    context.gathers = name or _ROOT


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
        raise PlanError(
            "data ranks did not run the same blocks in this step, and under ZeRO-3 all of them together gather each"
            f" block's weights (this rank's forward came to {context.gathers} last): the samples decide which way the"
            " forward takes. Use plan.data_parallel.zero = 2, or call every block for every batch, with no rows if"
            " need be."
        ) from error
