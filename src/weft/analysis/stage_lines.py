"""Describe a model's pipeline stages as text."""

from __future__ import annotations

import math

from weft.model.blueprint import Blueprint
from weft.model.families import FoundCut
from weft.model.meta_forward import glob_of
from weft.techniques.pipeline.stages import stage_of


def stage_lines(blueprint: Blueprint) -> list[str]:
    """Return lines about a model's stages: where it may be cut, the values that cross there and the contents of every
    stage; or why it cannot be cut."""
    cut = blueprint.cut
    if cut is None:
        return [f"# Pipeline stages: none: {blueprint.why_not('blocks')}."]
    where = f"before each of {len(cut.blocks) - 1} blocks, {cut.blocks[1]} to {cut.blocks[-1]}"
    lines = [f"# Pipeline stages: a border may lie {where}."]
    if not isinstance(cut, FoundCut):
        return [*lines, "# what crosses: the activation between two blocks (the model brings a table)"]
    lines += [f"# what crosses: {what}" for what in dict.fromkeys(map(_crossing, _borders(cut)))]
    shared = _on_every_stage(blueprint, cut)
    return lines + ([f"# on every stage: {', '.join(shared)}"] if shared else [])


def _borders(cut: FoundCut) -> list[tuple[str, ...]]:
    """The results that cross each border, with their elements per sample."""
    return [
        tuple(f"{glob_of(c.module)} ({math.prod(c.shape_for(1)):,} elements per sample)" for c in crossings)
        for crossings in cut.crossings
    ]


def _crossing(results: tuple[str, ...]) -> str:
    """Alike results once, with their number."""
    counts = {result: results.count(result) for result in results}
    listed = [result if count == 1 else f"{count} × {result}" for result, count in counts.items()]
    return f"the result{'s' if len(results) > 1 else ''} of {', '.join(listed)}"


def _on_every_stage(blueprint: Blueprint, cut: FoundCut) -> list[str]:
    """Parameters that no stage has for itself: read outside of modules, or in modules that run several times."""
    names = (name for name, _ in blueprint.module.named_parameters())
    return list(dict.fromkeys(glob_of(name) for name in names if stage_of(name, cut, ()) is None))
