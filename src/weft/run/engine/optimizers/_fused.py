"""Runs gathered for torch's fused kernels, which take lists of flat tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.run.engine.optimizers._ranges import ShardRange
from weft.techniques.core import Shard


@dataclass(frozen=True, slots=True)
class FusedKind:
    """Properties that all ranges of one fused call share."""

    group: int
    device: torch.device
    dtype: torch.dtype


def gather_runs(
    runs: Iterable[ShardRange], shards: tuple[Shard, ...], here: Collection[int]
) -> dict[FusedKind, list[ShardRange]]:
    """Sort the runs of the shards that are `here` into as few kernel calls as can be."""
    calls: dict[FusedKind, list[ShardRange]] = {}
    for run in runs:
        if run.shard not in here:
            continue
        shard = shards[run.shard]
        calls.setdefault(FusedKind(shard.group, shard.master.device, shard.master.dtype), []).append(run)
    return calls


def fold_scale(gradients: list[Tensor], gradient_scale: float, kind: FusedKind) -> Tensor | None:
    """Return the divisor by which a fused kernel applies `gradient_scale`, so that it costs no pass of its own.

    The kernels read the divisor in fp32 only, so other gradients, and scales without a finite inverse, are scaled here.
    """
    if gradient_scale == 1.0:
        return None
    # The kernel divides by the scale, as `GradScaler` wants it; the inverse must be finite and not denormal.
    if kind.dtype == torch.float32 and 1e-30 < abs(gradient_scale) < 1e30:
        return torch.full((), 1.0 / gradient_scale, dtype=torch.float32, device=kind.device)
    for gradient in gradients:
        gradient.mul_(gradient_scale)
    return None
