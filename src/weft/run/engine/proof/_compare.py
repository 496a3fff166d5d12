"""Compare what ranks computed with what plain PyTorch did, which rank 0 alone knows.

Rank 0 hands its tensors round, one after another; each rank holds its own shards against them.  So no rank but the
first ever has a second copy of the model, and what is asked of all are a few sums.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.mesh import Mesh
from weft.run.engine.proof._plain import PlainResult, distance_of
from weft.run.engine.proof._planned import StepsOfRank
from weft.techniques.core import CheckpointShard

_FLOOR = 1e-6
_LAWS = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 5e-2}
"""Largest relative difference; in bf16 every operator rounds, by 5e-3 on a loss of three small layers
(2026-11-27).  The others are those of `weft.verify.numerics`."""
_WIDE = ("fp64", "fp32")
"""Precisions in which buffers keep their dtype."""
_NOISE_FACTOR = 4.0
"""A plan may be so many times as far from plain PyTorch as a rounding of the weights carries it."""
_KINDS = ("draws", "dtype", "loss", "gradient", "buffer", "weight", "held")
"""Kinds of deviations, in the order in which they are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A value that differs from plain PyTorch's by more than its limit."""

    kind: str
    """One of `draws`, `dtype`, `loss`, `gradient`, `buffer`, `weight`, `held`."""
    name: str
    """Name of the tensor; `step 1` of a loss."""
    relative: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a proof; the same on all ranks."""

    num_tensors: int
    largest: float
    """Largest relative difference of a gradient."""
    deviations: tuple[Deviation, ...]
    """Everything beyond its limit, in the order in which a step computes it; empty: proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReferenceTensor:
    """A tensor of plain PyTorch, by name, shape and norm.  All ranks know these; rank 0 alone has the values."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    noise: float

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


def compare_ranks(outcome: PlainResult | None, mine: StepsOfRank, mesh: Mesh, precision: str) -> Verdict:
    """Return what differs; rank 0 gives the `outcome`.  Call on every rank."""
    known, losses, noise_of_losses = _handed_round(outcome, mesh)
    shards: dict[str, list[CheckpointShard]] = {}
    for shard in mine.shards:
        shards.setdefault(shard.name, []).append(shard)
    # By tensor: squared distance of what counts, number of its elements; largest distance of a copy, and other dtypes.
    counted = torch.zeros(len(known), 2, dtype=torch.float64)
    worst = torch.zeros(len(known), 2, dtype=torch.float64)
    # One tensor at a time is broadcast from rank 0: a rank never holds more than the largest one beside its own share.
    for index, one in enumerate(known):
        whole = _tensor_of_rank_0(one, outcome, mesh)
        for shard in shards.get(one.name, ()):
            distance = _squared_distance(whole, shard)
            worst[index, 0] = max(float(worst[index, 0]), distance)
            worst[index, 1] = max(float(worst[index, 1]), float(not _is_of_dtype(shard.tensor, whole)))
            if shard.counts:
                counted[index] += torch.tensor([distance, float(shard.tensor.numel())], dtype=torch.float64)
    loss_distances = _loss_distances(mine.losses, losses)
    worst, counted, loss_distances, repeats = _joined(worst, counted, loss_distances, mine.repeated, mesh)
    limits = _ProofLimits(known, losses, noise_of_losses, precision)
    deviations = [*_of_draws(repeats, mine), *_of_losses(loss_distances, losses, limits)]
    largest = 0.0
    for index, one in enumerate(known):
        # `counted` adds up the shards of a tensor; `worst` is a single copy's, which a sum over first copies would
        # miss.
        squared = max(float(worst[index, 0]), float(counted[index, 0]))
        relative, limit = limits.relative(one, math.sqrt(squared)), limits.of(one)
        lacks = one.kind != "held" and counted[index, 1] < math.prod(one.shape)
        if one.kind == "gradient" and relative <= limit:
            largest = max(largest, relative)
        # "not <=" and not ">": a difference that is no number counts as one.
        if lacks or not relative <= limit:
            deviations.append(Deviation(kind=one.kind, name=_bare(one), relative=relative, limit=limit))
        elif worst[index, 1] and one.kind == "buffer" and precision in _WIDE:
            deviations.append(Deviation(kind="dtype", name=_bare(one), relative=relative, limit=limit))
    deviations.sort(key=lambda deviation: _KINDS.index(deviation.kind))
    return Verdict(num_tensors=len(known), largest=largest, deviations=tuple(deviations))


def _bare(known: _ReferenceTensor) -> str:
    return known.name.partition("/")[2]


class _ProofLimits:
    """Largest differences from plain PyTorch that a plan may have, by tensor.  `weft.verify.numerics` compares two
    trials in the same way."""

    def __init__(
        self, known: Sequence[_ReferenceTensor], losses: Sequence[float], noise: Sequence[float], precision: str
    ) -> None:
        self._law = _LAWS[precision]
        self._whole: dict[str, float] = {}
        for one in known:
            self._whole[one.kind] = math.hypot(self._whole.get(one.kind, 0.0), one.norm)
        relative: dict[str, list[float]] = {}
        for one in known:
            relative.setdefault(one.kind, []).append(self.relative(one, one.noise))
        moved = max(change / (abs(loss) or 1.0) for change, loss in zip(noise, losses, strict=True))
        self.loss = max(self._law, _NOISE_FACTOR * moved)
        # A single tensor may by chance be moved by little, so the middle of all counts, too.
        self._typical = {kind: max(statistics.median(values), moved) for kind, values in relative.items()}

    def relative(self, one: _ReferenceTensor, distance: float) -> float:
        """A distance in terms of the tensor, or of a millionth of all of its kind."""
        scale = max(one.norm, _FLOOR * self._whole[one.kind])
        return distance / scale if scale else distance

    def of(self, one: _ReferenceTensor) -> float:
        return max(self._law, _NOISE_FACTOR * max(self.relative(one, one.noise), self._typical[one.kind]))


def _of_draws(repeats: bool, mine: StepsOfRank) -> list[Deviation]:
    name = min(mine.repeated, default="").partition("\0")[0]
    return [Deviation(kind="draws", name=name, relative=math.inf, limit=0.0)] if repeats else []


def _of_losses(distances: Tensor, losses: Sequence[float], limits: _ProofLimits) -> list[Deviation]:
    deviations: list[Deviation] = []
    for step, (distance, loss) in enumerate(zip(distances.tolist(), losses, strict=True), 1):
        relative = distance / (abs(loss) or 1.0)
        if not relative <= limits.loss:
            deviations.append(Deviation(kind="loss", name=f"step {step}", relative=relative, limit=limits.loss))
    return deviations


def _loss_distances(mine: Sequence[float], losses: Sequence[float]) -> Tensor:
    distances = [abs(own - loss) for own, loss in zip(mine, losses, strict=True)]
    return torch.tensor([value if math.isfinite(value) else math.inf for value in distances], dtype=torch.float64)


def _squared_distance(whole: Tensor, shard: CheckpointShard) -> float:
    """Squared distance of a rank's shard from plain PyTorch's; without bound where its place is another."""
    if whole.is_complex() and not shard.tensor.is_complex():
        whole = torch.view_as_real(whole)  # as stores keep complex parameters
    if tuple(shard.shape) != tuple(whole.shape):
        return math.inf
    own = shard.split.slice(whole).reshape(-1)[shard.start : shard.start + shard.tensor.numel()].to(shard.tensor)
    own = torch.where(own.isnan(), shard.tensor, own)  # blurred; plain steps in which something is no number end early
    squared = distance_of(own, shard.tensor) ** 2
    return squared if math.isfinite(squared) else math.inf


def _is_of_dtype(own: Tensor, whole: Tensor) -> bool:
    """Whether a rank's shard has the dtype of the whole tensor, or of its parts where stores keep complex ones so."""
    known = whole.dtype if own.is_complex() or not whole.is_complex() else whole.dtype.to_real()
    return own.dtype == known


# ── between ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _handed_round(outcome: PlainResult | None, mesh: Mesh) -> tuple[list[_ReferenceTensor], list[float], list[float]]:
    text = ""
    if outcome is not None:
        rows = [
            (name, list(tensor.shape), str(tensor.dtype), distance_of(tensor), outcome.noise.get(name, 0.0))
            for name, tensor in outcome.tensors.items()
        ]
        text = json.dumps([rows, outcome.losses, outcome.noise_of_losses])
    rows, losses, noise = json.loads(text_of_rank_0(text, mesh))
    known = [
        _ReferenceTensor(name=str(name), shape=tuple(shape), dtype=str(dtype), norm=float(norm), noise=float(moved))
        for name, shape, dtype, norm, moved in rows
    ]
    return known, losses, noise


def text_of_rank_0(text: str, mesh: Mesh) -> str:
    """Return rank 0's text.  Call on every rank."""
    group = mesh["world"].group
    if group is None:
        return text
    coded = torch.tensor(list(text.encode()), dtype=torch.uint8, device=mesh.device)
    size = torch.tensor([coded.numel()], device=mesh.device)
    dist.broadcast(size, 0, group=group)
    if mesh.rank != 0:
        coded = torch.empty(int(size), dtype=torch.uint8, device=mesh.device)
    if coded.numel():
        dist.broadcast(coded, 0, group=group)
    return bytes(coded.tolist()).decode()


def _tensor_of_rank_0(one: _ReferenceTensor, outcome: PlainResult | None, mesh: Mesh) -> Tensor:
    dtype: Any = getattr(torch, one.dtype.removeprefix("torch."))
    group = mesh["world"].group
    if group is None:
        assert outcome is not None, "one process has computed both"
        return _without_blurred(outcome, one.name).to(mesh.device)
    made = torch.empty(one.shape, dtype=dtype, device=mesh.device)
    if outcome is not None:
        made.copy_(_without_blurred(outcome, one.name))
    if made.numel():
        # Bytes: not every backend carries every dtype.
        dist.broadcast(made.reshape(-1).view(torch.uint8), 0, group=group)
    return made


def _without_blurred(outcome: PlainResult, name: str) -> Tensor:
    """A tensor of plain PyTorch with NaN where it says nothing."""
    tensor, blurred = outcome.tensors[name], outcome.blurred.get(name)
    return tensor if blurred is None else tensor.masked_fill(blurred, math.nan)


def _joined(
    worst: Tensor, counted: Tensor, losses: Tensor, repeated: frozenset[str], mesh: Mesh
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Largest and sums over all ranks; ranks that have the same samples and stages without a loss say so alike."""
    largest = torch.cat([worst.reshape(-1), losses, torch.tensor([float(bool(repeated))], dtype=torch.float64)])
    largest, sums = largest.to(mesh.device), counted.to(mesh.device)
    if (group := mesh["world"].group) is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(sums, group=group)
    maxima, size = largest.cpu(), worst.numel()
    return maxima[:size].view_as(worst), sums.cpu(), maxima[size : size + len(losses)], bool(maxima[-1])
