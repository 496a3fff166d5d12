"""Settings of a plan that the user has given: search chooses the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.plan import Plan
from weft.search._space import Space

_FIELDS: Mapping[str, str] = {
    "mesh.pipeline": "pipelines",
    "mesh.shard": "shards",
    "mesh.context": "contexts",
    "mesh.tensor": "tensors",
    "mesh.expert": "experts",
    "mesh.order": "orders",
    "data_parallel.zero": "zeros",
    "data_parallel.reduce_every": "reductions",
    "data_parallel.bucket_bytes": "bucket_bytes",
    "data_parallel.first_bucket_bytes": "first_bucket_bytes",
    "data_parallel.compression": "compressions",
    "data_parallel.algorithm": "algorithms",
    "tensor_parallel.scheme": "tensor_schemes",
    "tensor_parallel.sequence": "sequence_parallels",
    "context_parallel.scheme": "context_schemes",
    "pipeline_parallel.schedule": "schedules",
    "pipeline_parallel.chunks_per_rank": "chunks",
    "microbatch.size": "microbatch_sizes",
    "memory.recompute": "recomputes",
    "memory.offload": "offloads",
    "memory.fused_loss": "fused_losses",
    "compute.precision": "precisions",
}
"""Setting of a plan → values of the space."""
_DATA = ("mesh.replicate", "mesh.shard")


def pinned(space: Space, plan: Plan) -> Space:
    """Return the part of a space that has the settings that a plan was given (its `origins`).

    Settings that search does not choose, such as threads, are left to the caller, to be laid over what it finds.
    """
    changes: dict[str, Any] = {}
    for key in plan.origins:
        if key in _FIELDS:
            changes[_FIELDS[key]] = (_value(plan, key),)
    if plan.data_parallel.local_steps:
        if "data_parallel.algorithm" not in plan.origins:
            changes["algorithms"] = ("auto",)  # replicas have no sums in every step that another way could carry
        if "data_parallel.zero" not in plan.origins and plan.mesh.shard == 1:
            # ZeRO-1 and 2 share out over data ranks what each replica keeps for itself.
            changes["zeros"] = tuple(zero for zero in space.zeros if zero in (0, 3))
    if "memory.recompute" in plan.origins:
        changes["per_block_recompute"] = False
        if isinstance(plan.memory.recompute, tuple):
            del changes["recomputes"]
    if any(key in plan.origins for key in _DATA):
        changes["datas"] = (plan.mesh.data,)
        changes["shards"] = (plan.mesh.shard,) if plan.mesh.shard > 1 else None
    return replace(space, **changes)


def beyond_search(given: Plan) -> tuple[str, ...]:
    """Return the settings that a plan was given and search does not choose, such as threads or the rank of a codec."""
    return tuple(key for key in given.origins if key not in _FIELDS and key not in _DATA)


def with_given(plan: Plan, given: Plan) -> Plan:
    """Return a plan with the given settings that search does not choose.

    Raises:
        PlanError: they do not go with the others.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key in beyond_search(given):
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = _value(given, key)
    for section, settings in sections.items():
        plan = replace(plan, **{section: replace(getattr(plan, section), **settings)})
    return plan


def has_pins(plan: Plan, given: Plan) -> bool:
    """Whether a plan has those of the given settings that search chooses."""
    keys = [key for key in given.origins if key in _FIELDS or key in _DATA]
    return all(_value(plan, key) == _value(given, key) for key in keys)


def _value(plan: Plan, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(plan, section), name)
