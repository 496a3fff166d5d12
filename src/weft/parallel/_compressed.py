"""Between compression, which knows flat storages and names, and the stores, which know layouts and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from weft.comm import GroupView, Mesh
from weft.comm.compress import CompressedReduction, Compression, Frame, Kept, Span
from weft.errors import PlanError
from weft.parallel._layout import ParameterLayout
from weft.parallel._shard import Piece
from weft.parallel.buckets import Bucket, Member
from weft.plan import UNPROVEN, Plan

logger = logging.getLogger(__name__)


def compression_of(plan: Plan, seed: int, mesh: Mesh, momentum_decay: float | None) -> Compression | None:
    """Return what the plan says of compression, whose names `runnability` has checked; random draws follow `seed`.

    Of one that promises nothing about convergence the first rank warns, once per training.  Call on every rank.

    Raises:
        PlanError: 1-bit Adam with an optimizer that is not Weft's AdamW.
    """
    data = plan.data_parallel
    if data.compression == "none":
        return None
    if data.compression in UNPROVEN and mesh.rank == 0:
        logger.warning(
            'plan.data_parallel.compression = "%s": nothing guarantees that this training converges as without it,'
            " because a step applies little of its gradients and owes the rest to later ones. Compare the losses of"
            ' a short run with compression = "none" first, or use "int8", which sends every gradient.',
            data.compression,
        )
    if data.compression == "onebit" and momentum_decay is None:
        raise PlanError(
            'plan.data_parallel.compression = "onebit" freezes the variance of AdamW, which your own optimizer does'
            ' not allow. Use "int8", or train a recipe with optimizer.name = "adamw".'
        )
    match data.compression:
        case "bf16" | "int8" | "powersgd" | "topk" | "onebit" | "randomk" | "signsgd" as codec:
            return Compression(
                codec=codec,
                powersgd_rank=data.powersgd_rank,
                topk_share=data.topk_share,
                randomk_share=data.randomk_share,
                seed=seed,
                onebit_warmup_steps=data.onebit_warmup_steps,
                onebit_decay=0.0 if momentum_decay is None else momentum_decay,
            )
        case other:
            raise AssertionError(f"{other} cannot be run")


def compressible(compression: Compression, mesh: Mesh) -> Callable[[Member], bool]:
    """Return which parameters may be compressed.

    Not those of which ranks outside the reduction hold copies: a stage that shares a tied weight, and the tensor ranks
    of what is not cut between them.  Each copy would be rounded by itself, and copies that differ drift apart.
    """
    has_tensor_ranks = mesh.size("tensor") > 1

    def is_taken(member: Member) -> bool:
        layout = member.layout
        is_copied = member.tie is not None or layout.tied or (has_tensor_ranks and layout.split is None)
        return not is_copied and compression.takes(member.parameter.shape)

    return is_taken


def frame_of(bucket: Bucket, *, sharded: bool) -> Frame:
    """Describe a bucket's storage to a codec; `sharded` when each data rank needs its region only."""
    spans = [
        Span(name=member.layout.name, offset=offset, shape=member.parameter.shape)
        for member, offset in zip(bucket.members, bucket.offsets, strict=True)
    ]
    return Frame(
        spans=tuple(spans),
        num_elements=bucket.num_elements,
        regions=tuple(bucket.regions) if sharded else None,
    )


def pieces_of(
    reduction: CompressedReduction,
    layouts: Mapping[str, ParameterLayout],
    view: GroupView,
    *,
    starts: Mapping[str, int] | None = None,
    shard: tuple[int, int] = (0, 1),
) -> list[Piece]:
    """Return what a reduction over `view` must keep, as pieces of a checkpoint.

    `starts` gives the first element of parameters of which this rank holds a run only, and `shard` its place (index,
    number) among the ranks that hold the other runs.
    """
    pieces: list[Piece] = []
    for kept in reduction.kept():
        layout = layouts[kept.name]
        if kept.is_own:
            pieces.append(_residual(kept, layout, view, (starts or {}).get(kept.name, 0)))
        else:
            pieces.append(_shared(kept, layout, view, shard))
    return pieces


def _residual(kept: Kept, layout: ParameterLayout, view: GroupView, start: int) -> Piece:
    return Piece(
        name=f"compression/{kept.kind}/{layout.name}",
        shape=layout.shape,
        tensor=kept.tensor,
        split=layout.split,
        start=start,
        addend=(view.index, view.size),
    )


def _shared(kept: Kept, layout: ParameterLayout, view: GroupView, shard: tuple[int, int]) -> Piece:
    """What all members hold alike belongs to the matrix that this rank sees; of one cut otherwise it says nothing, and
    none is loaded."""
    cut = "" if layout.split is None else f"/tensor-{layout.split.index}-of-{layout.split.parts}"
    cut += "" if shard[1] == 1 else f"/shard-{shard[0]}-of-{shard[1]}"
    return Piece(
        name=f"compression/{kept.kind}{cut}/{layout.name}",
        shape=torch.Size(kept.tensor.shape),
        tensor=kept.tensor.view(-1),
        counts=view.index == 0,
    )
