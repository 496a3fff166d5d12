"""Turn a layout, which is numbers, into a plan, under which a recipe can be trained."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_type_hints

from weft.config.plan import MicrobatchPlan, Plan, even_shares
from weft.config.recipe import Precision
from weft.errors import PlanError
from weft.techniques.cost_terms import Layout, layout_settings
from weft.techniques.pipeline.schedules import Schedule
from weft.techniques.zero.settings import stage_of


class PlanSections:
    """Makes sections of plans, each of them once: thousands of layouts have a few hundred between them, and checking
    them took a fifth of a search in which most are refused (2026-11-26)."""

    def __init__(self) -> None:
        self.made = functools.lru_cache(maxsize=4096, typed=True)(_section)


def plan_of(
    layout: Layout,
    *,
    global_batch_size: int,
    shares: Sequence[int] | None = None,
    known: PlanSections | None = None,
) -> Plan:
    """Return the plan that says what a layout says; `Layout.of` gives the layout back.

    Args:
        global_batch_size: of the recipe; the data ranks share its microbatches as evenly as can be.
        shares: microbatches of each data rank, where they are meant to be uneven.
        known: sections that were made before; takes those that are new.

    Raises:
        PlanError: a plan cannot say it: its precision, or microbatches that are not the global batch.
    """
    derived: dict[str, Any] = {
        "data_parallel.zero": stage_of(layout.zero),
        "data_parallel.first_bucket_bytes": min(layout.bucket_bytes, layout.first_bucket_bytes),
        "data_parallel.reduce_precision": _reduce_precision(layout),
        "pipeline_parallel.schedule": _schedule(layout),
        "compute.precision": _precision(layout),
    }
    sections: dict[str, dict[str, Any]] = {}
    same = {setting.key: getattr(layout, setting.layout) for setting in layout_settings()}
    for key, value in (same | derived).items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    sections.pop("microbatch")
    make = _section if known is None else known.made
    made = {name: make(name, **settings) for name, settings in sections.items()}
    return Plan(microbatch=_microbatch(layout, global_batch_size, shares), **made)


@functools.cache
def _sections() -> dict[str, Any]:
    """The classes of a plan's sections, by name."""
    return get_type_hints(Plan)


def _section(name: str, **settings: Any) -> Any:
    return _sections()[name](**settings)


def _microbatch(layout: Layout, global_batch_size: int, shares: Sequence[int] | None) -> MicrobatchPlan:
    size, total = layout.microbatch_size, global_batch_size // layout.microbatch_size
    sizes = tuple(shares) if shares is not None else even_shares(total, layout.data)
    if size * sum(sizes) != global_batch_size or len(sizes) != layout.data or max(sizes) != layout.microbatches:
        raise PlanError(
            f"{layout.microbatches} microbatches of {size} samples on the busiest of {layout.data} data ranks do not "
            f"make a global batch of {global_batch_size}: even shares would be {even_shares(total, layout.data)[0]}."
        )
    return MicrobatchPlan.of(size, sizes)


def _schedule(layout: Layout) -> Schedule:
    if layout.schedule == "zero_bubble_2p":
        raise PlanError('schedule = "zero_bubble_2p" is priced, not run. Use schedule = "interleaved_zero_bubble".')
    return layout.schedule


def _precision(layout: Layout) -> Precision:
    for precision in get_args(Precision):
        if precision == layout.precision:
            return precision
    known = ", ".join(get_args(Precision))
    problem = f"can be priced, but no plan has it. Use one of {known}."
    raise PlanError(f'compute.precision = "{layout.precision}" {problem}')


def _reduce_precision(layout: Layout) -> Literal["fp32", "compute"]:
    element = {"fp64": 8, "fp32": 4}.get(_precision(layout))
    if element is None:
        if layout.gradient_bytes in (2, 4):
            return "compute" if layout.gradient_bytes == 2 else "fp32"
    elif layout.gradient_bytes == element:
        return "fp32"
    raise PlanError(f"gradients of {layout.gradient_bytes} bytes stand in no plan with {layout.precision}.")
