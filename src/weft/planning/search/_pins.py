"""Settings of a plan that the user has given: search chooses the others."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.config.plan import Plan, plan_settings
from weft.config.settings import DeclaredSetting
from weft.planning.search._space import Space
from weft.techniques.registry import TECHNIQUES

_DATA = ("mesh.replicate", "mesh.shard")


@functools.cache
def searched() -> Mapping[str, DeclaredSetting]:
    """Return the settings that search chooses, by their dotted keys."""
    return {setting.key: setting for setting in plan_settings() if setting.knob.space}


def pinned(space: Space, plan: Plan) -> Space:
    """Return the part of a space that has the settings that a plan was given (its `origins`).

    Settings that search does not choose, such as threads, are left to the caller, to be laid over what it finds.
    """
    changes: dict[str, Any] = {}
    for technique in TECHNIQUES:
        for key, values in technique.search_values(plan).items():
            name = searched()[key].knob.space
            changes[name] = tuple(value for value in getattr(space, name) if value in values)
    for key in plan.origins:
        if key not in searched():
            continue
        knob, value = searched()[key].knob, _value(plan, key)
        changes |= dict.fromkeys(knob.narrows, False)
        if not (knob.narrows and isinstance(value, tuple)):  # a word per block is none of a space's values
            changes[knob.space] = (value,)
    if any(key in plan.origins for key in _DATA):
        changes["datas"] = (plan.mesh.data,)
        changes["shards"] = (plan.mesh.shard,) if plan.mesh.shard > 1 else None
    return replace(space, **changes)


def beyond_search(pins: Plan) -> tuple[str, ...]:
    """Return the settings that a plan was given and search does not choose, such as threads or the rank of a codec."""
    return tuple(key for key in pins.origins if key not in searched() and key not in _DATA)


def with_pins(plan: Plan, pins: Plan) -> Plan:
    """Return a plan with the given settings that search does not choose.

    Raises:
        PlanError: they do not go with the others.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key in beyond_search(pins):
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = _value(pins, key)
    for section, settings in sections.items():
        plan = replace(plan, **{section: replace(getattr(plan, section), **settings)})
    return plan


def has_pins(plan: Plan, pins: Plan) -> bool:
    """Whether a plan has those of the given settings that search chooses."""
    keys = [key for key in pins.origins if key in searched() or key in _DATA]
    return all(_value(plan, key) == _value(pins, key) for key in keys)


def _value(plan: Plan, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(plan, section), name)
