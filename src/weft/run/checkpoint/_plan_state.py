"""State of a plan, in a checkpoint: residuals and learnt bases of compression, and the weights of each replica that
steps by itself.

A checkpoint may be loaded under a plan that compresses otherwise, over other ranks, or not at all, so such tensors may
be missing or left over.  The residuals of compressed gradients, though, are part of the training: with residuals
r₁ … rₘ on m ranks, the coming sums contain Σ rᵢ.  On n ranks each takes Σ rᵢ / n, which keeps that sum.  Replicas' own
weights and optimizer states have no such sum: as many replicas as saved them take them up, and others start from the
weights that all share.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from weft.errors import CheckpointError
from weft.run.checkpoint._peers import Peers
from weft.run.checkpoint._read import StoredCheckpoint
from weft.techniques.core import CheckpointShard

logger = logging.getLogger(__name__)

_COMPRESSION, _LOCAL = "compression/", "local/"
_ADDEND = re.compile(r"(?P<name>.+)@(?P<index>\d+)-of-(?P<number>\d+)", re.ASCII)
_REPLICA = re.compile(r"local/\d+-of-\d+/(?P<kind>\w+)/", re.ASCII)
_LOST: Mapping[str, str] = {
    "model": "what each replica has learnt since all were averaged",
    "optimizer": "the optimizer states of all replicas but the first",
    "momentum": "the outer momentum of local steps",
}
"""Kind of tensor → what is lost if this plan has no place for it."""

_Addends = Mapping[str, Sequence[str]]
"""Name → stored names of its addends, by rank."""


def is_of_plan(name: str) -> bool:
    """Whether a checkpoint's tensor of this name belongs to a plan."""
    return name.startswith((_COMPRESSION, _LOCAL))


def fill_plan_state(stored: StoredCheckpoint, shards: Sequence[CheckpointShard], peers: Peers) -> None:
    """Fill the shards that belong to a plan with what the checkpoint has for them.  Call on every rank.

    A rank's own tensor comes back bit for bit where as many ranks as before hold one, else as an equal part of the sum;
    what is not there becomes zero, if it is an addend, and else stays as it is.  What nobody takes is lost,
    which rank 0 warns of.

    Raises:
        CheckpointError: on every rank, when a tensor has another shape.
    """
    plan_shards = [shard for shard in shards if is_of_plan(shard.name)]
    addends = _addends(stored.runs)
    problem = peers.first_problem(next(_wrong_shapes(stored, plan_shards, addends), None))
    if problem is not None:
        raise CheckpointError(f"{stored.folder} does not fit: {problem}")
    _warn_of_lost(stored, plan_shards, addends, peers)
    _warn_of_lost_replicas(stored, plan_shards, peers)
    # The same number of addends as before has the same stored names, so each rank gets its own tensor, bit for bit.
    for shard in plan_shards:
        if shard.stored_name in stored.runs:
            stored.fill(shard.stored_name, [shard])
        elif shard.addend is not None:
            _fill_with_part(stored, shard, addends.get(shard.name, ()))


def _addends(names: Iterable[str]) -> _Addends:
    by_name: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if is_of_plan(name) and (match := _ADDEND.fullmatch(name)):
            by_name.setdefault(match["name"], []).append((int(match["index"]), name))
    return {name: [stored for _, stored in sorted(group)] for name, group in by_name.items()}


def _wrong_shapes(stored: StoredCheckpoint, plan_shards: Sequence[CheckpointShard], addends: _Addends) -> Iterator[str]:
    for shard in plan_shards:
        names = addends.get(shard.name, ()) if shard.addend is not None else (shard.name,)
        for name in names:
            if name in stored.runs and stored.shape(name) != shard.shape:
                yield f"{name} is {list(stored.shape(name))} there and {list(shard.shape)} here."


def _warn_of_lost(
    stored: StoredCheckpoint, plan_shards: Sequence[CheckpointShard], addends: _Addends, peers: Peers
) -> None:
    if not addends:
        return
    mine = {shard.name for shard in plan_shards if shard.addend is not None}
    names = sorted(addends)
    untaken = peers.minimum([int(name not in mine) for name in names])
    lost = [name for name, flag in zip(names, untaken, strict=True) if flag]
    if lost and peers.rank == 0:
        logger.warning(
            "%s holds what compressed gradients still owed to %d parameters (%s …), and this plan does not compress"
            " them with error feedback: it is dropped. To keep it, go on with the compression that saved it.",
            stored.folder,
            len(lost),
            lost[0].rpartition("/")[2],
        )


def _warn_of_lost_replicas(stored: StoredCheckpoint, plan_shards: Sequence[CheckpointShard], peers: Peers) -> None:
    names = sorted(name for name in stored.runs if name.startswith(_LOCAL))
    if not names:
        return
    mine = {shard.name for shard in plan_shards}
    untaken = peers.minimum([int(name not in mine) for name in names])
    kinds = {_kind(name) for name, flag in zip(names, untaken, strict=True) if flag}
    lost = [what for kind, what in _LOST.items() if kind in kinds]
    if lost and peers.rank == 0:
        logger.warning(
            "%s holds %s, for which this plan has no place: dropped. To keep it, go on with the replicas and the"
            " local_steps that saved it.",
            stored.folder,
            ", and ".join(lost),
        )


def _kind(name: str) -> str:
    """`model` of `local/1-of-2/model/…`, `momentum` of `local/momentum/…`."""
    match = _REPLICA.match(name)
    return match["kind"] if match else name.split("/")[1]


def _fill_with_part(stored: StoredCheckpoint, shard: CheckpointShard, names: Sequence[str]) -> None:
    """An equal part of the sum of all addends, added up in rank order."""
    assert shard.addend is not None
    one = torch.empty_like(shard.tensor)
    shard.tensor.zero_()
    for name in names:
        stored.fill(name, [replace(shard, tensor=one)])
        shard.tensor.add_(one)
    shard.tensor.div_(shard.addend[1])
