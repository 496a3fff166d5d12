"""Compares the tensors of two plans, by the tolerances of the numerics check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.techniques.core import CheckpointShard

TOLERANCES: Mapping[str, float] = {"fp64": 1e-10, "fp32": 1e-5}
"""Largest ‖Δ‖ / max(‖g‖, 1e-6·‖G‖) of a tensor that counts as equal."""

_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class Difference:
    """Relative distance of one tensor from the reference."""

    name: str
    relative: float

    def __str__(self) -> str:
        return f"{self.name} differs by {self.relative:.1e}"


def assemble(ranks: Sequence[Sequence[CheckpointShard]]) -> dict[str, Tensor]:
    """Put the shards of all ranks together to whole tensors.

    Every rank's copy is looked at, not only those that count: replicas that disagree give nan, and so does an element
    that no rank holds.
    """
    locals_: dict[str, dict[int, Tensor]] = {}
    shapes: dict[str, CheckpointShard] = {}
    for shards in ranks:
        for shard in shards:
            shapes[shard.name] = shard
            index, shape = shard.split.index, shard.split.local_shape(shard.shape)
            parts_by_index = locals_.setdefault(shard.name, {})
            if index not in parts_by_index:
                parts_by_index[index] = torch.full((shape.numel(),), torch.nan, dtype=torch.float64)
            run = parts_by_index[index][shard.start : shard.start + shard.tensor.numel()]
            new = shard.tensor.detach().to("cpu", torch.float64)
            # NaN marks elements that no rank has brought yet.  The first copy is taken; a later one must equal it to
            # 1e-5, else the element becomes NaN, which no comparison passes.
            missing = run.isnan()
            scale = float(new.norm())
            disagree = (~missing) & ((run - new).abs() > 1e-5 * scale)
            run.copy_(torch.where(missing, new, torch.where(disagree, torch.nan, run)))
    return {name: _join(shapes[name], parts_by_index) for name, parts_by_index in locals_.items()}


def _join(shard: CheckpointShard, parts_by_index: Mapping[int, Tensor]) -> Tensor:
    shape = shard.split.local_shape(shard.shape)
    absent = torch.full(shape, torch.nan, dtype=torch.float64)
    parts = [
        parts_by_index[index].view(shape) if index in parts_by_index else absent for index in range(shard.split.parts)
    ]
    return shard.split.join(parts)


def compare(reference: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> list[Difference]:
    """Return the difference of every tensor, largest first; a missing, unexpected or non-finite one is infinite."""
    # ‖Δ‖ / max(‖g‖, 1e-6·‖G‖): a gradient that is zero in exact arithmetic has no relative error of its own, so tiny
    # ones are measured by a millionth of the whole gradient.
    whole = float(torch.sqrt(sum((tensor.double().square().sum() for tensor in reference.values()), torch.zeros(()))))
    differences: list[Difference] = []
    for name in reference.keys() | candidate.keys():
        if name not in reference or name not in candidate or reference[name].shape != candidate[name].shape:
            differences.append(Difference(name, float("inf")))
            continue
        expected = reference[name].double()
        delta = float((expected - candidate[name].double()).norm())
        scale = max(float(expected.norm()), _FLOOR * whole)
        relative = delta / scale if scale else delta
        differences.append(Difference(name, relative if relative == relative else float("inf")))
    return sorted(differences, key=lambda difference: -difference.relative)
