"""Whether a checkpoint fits what the ranks hold, found out before anything changes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from weft.errors import CheckpointError, did_you_mean
from weft.run.checkpoint._peers import Peers
from weft.run.checkpoint._plan_state import is_of_plan
from weft.run.checkpoint._read import StoredCheckpoint
from weft.techniques.core import CheckpointShard

logger = logging.getLogger(__name__)

_SHOWN = 3


def match(
    stored: StoredCheckpoint, shards: Sequence[CheckpointShard], peers: Peers
) -> dict[str, list[CheckpointShard]]:
    """Return the shards by tensor, in the checkpoint's order of reading, without those that belong to a plan (see
    `carry_over`).  Call on every rank.

    Raises:
        CheckpointError: on every rank, when a tensor is missing, has another shape, would lose precision, or is in the
            checkpoint but nowhere in the model.
    """
    by_name: dict[str, list[CheckpointShard]] = {}
    for shard in shards:
        if not is_of_plan(shard.name):
            by_name.setdefault(shard.name, []).append(shard)
    # What is missing, each rank sees alone.  What is too much shows only over all ranks, since each has its stage's
    # part; that exchange is entered by all or by none, because the first problem is the same on all.
    problem = peers.first_problem(_problem_of(stored, by_name))
    if problem is None:
        problem = _unexpected(stored, by_name, peers)
    if problem is not None:
        raise CheckpointError(f"{stored.folder} does not fit: {problem}")
    converted = [name for name in sorted(by_name) if by_name[name][0].tensor.dtype != stored.dtype(name)]
    if converted:
        logger.warning("%d tensors change precision while loading (%s)", len(converted), _listed(converted))
    return dict(sorted(by_name.items()))


def _problem_of(stored: StoredCheckpoint, by_name: dict[str, list[CheckpointShard]]) -> str | None:
    missing = [name for name in by_name if name not in stored.runs]
    if missing:
        hint = did_you_mean(missing[0], stored.runs) if len(missing) < len(by_name) else ""
        return (
            f"it lacks {len(missing)} of the {len(by_name)} tensors wanted: {_listed(missing)}.{hint} "
            "Load it with the recipe that saved it (same model, optimizer and average_decay)."
        )
    shapes = [
        f"{name} is {list(stored.shape(name))} there and {list(group[0].shape)} here"
        for name, group in by_name.items()
        if stored.shape(name) != group[0].shape
    ]
    if shapes:
        return f"{len(shapes)} shapes differ: {_listed(shapes)}. Load it with the sizes of the recipe that saved it."
    narrowed = [
        f"{name} is {_word(stored.dtype(name))} there and {_word(shard.tensor.dtype)} here"
        for name, group in by_name.items()
        for shard in group[:1]
        if not _is_permitted(stored.dtype(name), shard.tensor.dtype)
    ]
    if narrowed:
        return f"{len(narrowed)} tensors would lose precision: {_listed(narrowed)}. Use the precision that saved it."
    return None


def _unexpected(stored: StoredCheckpoint, by_name: dict[str, list[CheckpointShard]], peers: Peers) -> str | None:
    """Name the checkpoint's tensors that no rank wants; each rank alone may want only its stage's."""
    names = [name for name in sorted(stored.runs) if not is_of_plan(name)]
    unwanted = peers.minimum([0 if name in by_name else 1 for name in names]) if names else []
    extra = [name for name, flag in zip(names, unwanted, strict=True) if flag]
    if not extra:
        return None
    return (
        f"it has {len(extra)} tensors that the model has not: {_listed(extra)}. "
        "Load it with the recipe that saved it, or begin a new run."
    )


def _is_permitted(source: torch.dtype, target: torch.dtype) -> bool:
    """Widening is, and so is rounding to half precision.

    Trained weights and optimizer states always have wider masters; what is held in half precision is a copy to compute
    with, which a plan of that precision rounds from the start.
    """
    if source == target:
        return True
    if source.is_floating_point != target.is_floating_point or torch.bool in {source, target}:
        return False
    return target in {torch.bfloat16, torch.float16} or torch.promote_types(source, target) == target


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(items: Sequence[str]) -> str:
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
