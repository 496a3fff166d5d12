"""Cells of networks whose channels are shared out: `ALL` is for `make parity`, `DRAWN` for every run of the tests."""

from __future__ import annotations

from collections.abc import Iterator

from cells import Cell, plan
from channel_models import NETS

from weft.recipe import ModelRecipe

MODELS = {
    name: ModelRecipe(factory="channel_models:build_channels", arguments={"net": name}) for name in NETS
}


def alone() -> Iterator[Cell]:
    """The tensor axis and nothing else: one microbatch, for batch norms see all of it."""
    for name in NETS:
        yield Cell(name, plan(tensor=2, micro=12))


ALL = tuple(dict.fromkeys(alone()))
DRAWN = ALL
