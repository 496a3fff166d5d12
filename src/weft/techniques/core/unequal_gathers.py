"""Ranks that do not gather the same blocks under ZeRO-3, because their samples take other ways through the model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from weft.errors import CollectiveError, PlanError
from weft.techniques.core._context import StepContext


def paths_differ(where: str) -> PlanError:
    """The error of data ranks that did not go the same way; `where` says what is known of it."""
    return PlanError(
        "data ranks did not run the same blocks in this step, and under ZeRO-3 all of them together gather each"
        f" block's weights ({where}): the samples decide which way the forward takes. Use plan.data_parallel.zero = 2,"
        " or call every block for every batch, with no rows if need be."
    )


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
        raise paths_differ(f"this rank's forward came to {context.gathers} last") from error
