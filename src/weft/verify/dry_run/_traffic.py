"""Whether a rank sent what its predicted program says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.comm.telemetry import StepTraffic
from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.formatting import format_bytes
from weft.model.blueprint import Blueprint
from weft.techniques.send_trace import Outline
from weft.verify.dry_run.trace_sends import trace_sends_or_reason
from weft.verify.program import Traffic, differences, occasions_of, program_of

_LISTED = 20
"""Differences that are told; the first ones tell most."""


def unlike_plan(
    recipe: Recipe, plan: Plan, outline: Outline, rank: int, traffic: StepTraffic, *, is_fingerprinted: bool = False
) -> list[str]:
    """Return every kind of send whose count in a step of `rank` is not what its program says."""
    program = program_of(recipe, plan, outline, rank, labels=traffic.labels, is_fingerprinted=is_fingerprinted)
    occasions = occasions_of(recipe, plan, traffic.step, is_first=traffic.is_first, some_unused=traffic.some_unused)
    if not is_fingerprinted:  # a training notes the steps of which it reports
        occasions = (*occasions, "reported")
    rows = {(table, number): most for table, number, most in traffic.rows}
    return differences(program.traffic(*occasions, rows=rows), _counted(traffic))


def plan_and_measured(recipe: Recipe, plan: Plan, blueprint: Blueprint, steps: Sequence[StepTraffic]) -> str:
    """Say how what rank 0 sent in these steps, at least one, compares with the plan: in one line where it is equal."""
    total: Traffic = Counter()
    for one in steps:
        total += _counted(one)
    size = sum(size_bytes * count for (_, _, size_bytes), count in total.items()) / len(steps)
    count = sum(total.values()) / len(steps)
    sent = f"{count:,.0f} collectives and messages of rank 0, {format_bytes(size)} per step"
    outline = trace_sends_or_reason(blueprint)
    if isinstance(outline, str):
        return f"{sent}; not compared with the plan: nothing tells {outline}"
    lines = [f"step {one.step + 1}: {line}" for one in steps for line in unlike_plan(recipe, plan, outline, 0, one)]
    if not lines:
        return f"{sent}: exactly what the plan says, in the {len(steps)} steps that were reported"
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "\n          ".join([f"{sent}: otherwise than the plan says", *lines[:_LISTED], *more])


def _counted(traffic: StepTraffic) -> Traffic:
    return Counter({(axis, operation, size_bytes): count for axis, operation, size_bytes, count in traffic.sent})
