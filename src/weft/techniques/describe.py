"""The plan as the first lines of a run show it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from weft.config.cluster import Cluster
from weft.config.document import format_value
from weft.config.plan import AXES, Axis, MeshPlan, ModelFacts, Plan
from weft.techniques.check import mesh_sizes
from weft.techniques.registry import describe

_LABEL = "plan"
_INDENT = 10
_ORDER = "mesh.order"


def describe_plan(
    plan: Plan, reasons: Mapping[str, str], facts: ModelFacts, cluster: Cluster | None = None
) -> list[str]:
    """Return lines for the start of a run: the plan in one line, then each setting that is not the default or has a
    reason or an origin, with it.

    Args:
        reasons: dotted key → why (from `choose_plan`); empty for a plan that was given.
        cluster: adds the cores or devices of the first line.
    """
    settings = list(_settings(plan, reasons))
    width = max((len(text) for text, _ in settings), default=0)
    lines = [f"{text.ljust(width)}   {why}".rstrip() for text, why in settings]
    return [f"{_LABEL.ljust(_INDENT)}{_headline(plan, facts, cluster)}", *(" " * _INDENT + line for line in lines)]


def _headline(plan: Plan, facts: ModelFacts, cluster: Cluster | None) -> str:
    world = plan.mesh.world_size
    processes = f"{mesh_sizes(plan)} = {world} processes" if world > 1 else "1 process"
    if cluster is not None:
        where = f"{cluster.num_cores:,} cores"
        if cluster.has_accelerators:
            where = f"{cluster.num_devices:,} {' and '.join(cluster.kinds)}"
        processes += f" on {where}"
    parts = [processes]
    if plan.mesh.pipeline > 1:
        parts.append(plan.pipeline_parallel.schedule_name)
    if plan.mesh.data > 1:
        parts.append(plan.data_parallel.stage_name)
    parts += describe(plan.data_parallel)
    parts.append(plan.compute.precision)
    if facts.num_parameters is not None:
        parts.append(f"{facts.num_parameters / 1e6:,.1f} M parameters")
    return "  ·  ".join(parts)


def _settings(plan: Plan, reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield `section.name = value` and why."""
    for section in dataclasses.fields(plan):
        part: Any = getattr(plan, section.name)
        if not dataclasses.is_dataclass(part):
            continue
        for field in dataclasses.fields(part):
            key, value = f"{section.name}.{field.name}", getattr(part, field.name)
            why = reasons.get(key) or _origin(plan.origins.get(key))
            if key == _ORDER and _is_usual(plan.mesh):
                continue
            if value != field.default or why:
                yield f"{key} = {format_value(value)}", why


def _is_usual(mesh: MeshPlan) -> bool:
    """Whether the axes that are larger than one have the order that they have by default."""
    larger: list[Axis] = [axis for axis in mesh.order if getattr(mesh, axis) > 1]
    return larger == sorted(larger, key=AXES.index)


def _origin(origin: str | None) -> str:
    return "" if origin is None else f"from {origin}"
