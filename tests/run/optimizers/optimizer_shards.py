"""Shards cut by hand out of a few parameters, and the textbook updates that they must equal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.config.recipe import GroupSettings, OptimizerGroup
from weft.run.engine.optimizers import ShardOptimizer
from weft.techniques.core import CheckpointShard, ParameterLayout, Segment, Shard, Split

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.weight": (12, 8),
    "norm.weight": (8,),
    "attention.qkv": (12, 8),
    "attention.out": (8, 4),
    "conv.weight": (4, 2, 3, 3),
    "scale": (),
}
SPLITS: dict[str, tuple[int, int]] = {
    "embedding.weight": (0, 1),
    "attention.qkv": (0, 3),
    "attention.out": (1, 1),
    "conv.weight": (1, 1),
}
"""Name → (dim, blocks) of the parameters that the tensor axis splits."""


def draw(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) * scale for n, s in SHAPES.items()}


def layout_of(name: str, parts: int = 1, index: int = 0) -> ParameterLayout:
    shape = torch.Size(SHAPES[name])
    if parts == 1 or name not in SPLITS:
        return ParameterLayout(name=name, shape=shape)
    dim, blocks = SPLITS[name]
    split = Split(dim=dim, parts=parts, index=index, blocks=blocks)
    return ParameterLayout(name=name, shape=shape, placements={"tensor": split})


def local_part(layout: ParameterLayout, whole: Tensor) -> Tensor:
    return layout.split.slice(whole)


def local_shape(layout: ParameterLayout) -> torch.Size:
    return layout.split.local_shape(layout.shape)


def columns_of(*layouts: ParameterLayout) -> dict[str, int]:
    """Matrices → columns of this rank's part: what a shard says of those whose rows ZeRO cuts."""
    shapes = {layout.name: local_shape(layout) for layout in layouts}
    return {name: shape[1] for name, shape in shapes.items() if len(shape) == 2 and shape[0] > 1}


def make_shard(
    runs: Sequence[tuple[ParameterLayout, int, int]],
    values: Mapping[str, Tensor],
    *,
    gap: int = 0,
    group: int = 0,
    cut_group: GroupView | None = None,
    counts: bool = True,
    cut_matrices: Mapping[str, int] | None = None,
) -> Shard:
    """A shard over (layout, start, length) runs of whole `values`, with `gap` elements of padding after each."""
    segments: list[Segment] = []
    offset = 0
    for layout, start, length in runs:
        segments.append(
            Segment(layout=layout, local_shape=local_shape(layout), offset=offset, start=start, length=length)
        )
        offset += length + gap
    dtype = next(iter(values.values())).dtype
    shard = Shard(
        master=torch.zeros(offset, dtype=dtype),
        segments=segments,
        group=group,
        counts=counts,
        cut_group=cut_group,
        cut_matrices=cut_matrices or {},
    )
    fill(shard.master, shard, values)
    return shard


def fill(flat: Tensor, shard: Shard, values: Mapping[str, Tensor]) -> None:
    for segment in shard.segments:
        part = local_part(segment.layout, values[segment.layout.name]).reshape(-1)
        flat[segment.offset : segment.offset + segment.length] = part[segment.start : segment.start + segment.length]


def set_gradients(shards: Sequence[Shard], gradients: Mapping[str, Tensor]) -> None:
    for shard in shards:
        shard.gradient = torch.zeros_like(shard.master)
        fill(shard.gradient, shard, gradients)


def whole_groups(weight_decay: float = 0.0, scale: float = 1.0) -> list[OptimizerGroup]:
    settings = GroupSettings(learning_rate_scale=scale, weight_decay=weight_decay)
    return [OptimizerGroup(settings=settings, names=tuple(SHAPES))]


def scatter(stored: CheckpointShard, whole: Tensor) -> None:
    """Write a checkpoint shard's values into a whole tensor of ones that are not yet known (nan)."""
    local = torch.full_like(stored.split.slice(whole), math.nan).reshape(-1)
    local[stored.start : stored.start + stored.tensor.numel()] = stored.tensor.to(whole.dtype)
    parts = [torch.full_like(stored.split.slice(whole), math.nan) for _ in range(stored.split.parts)]
    parts[stored.split.index] = local.view(parts[0].shape)
    known = stored.split.join(parts)
    whole.copy_(torch.where(known.isnan(), whole, known))


def gather(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """Whole parameters out of the shards of one rank or of all; what nobody holds stays nan."""
    results = {name: torch.full(shape, math.nan, dtype=torch.float64) for name, shape in SHAPES.items()}
    for shard in shards:
        for segment in shard.segments:
            run = shard.master[segment.offset : segment.offset + segment.length]
            layout = segment.layout
            scatter(
                CheckpointShard(
                    name=layout.name, shape=layout.shape, tensor=run, split=layout.split, start=segment.start
                ),
                results[layout.name],
            )
    return results


def relative_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    norm = math.sqrt(sum(float(w.double().square().sum()) for w in expected.values()))
    differences = [
        float((actual[n].double() - w.double()).norm()) / max(float(w.double().norm()), 1e-6 * norm)
        for n, w in expected.items()
    ]
    return math.inf if any(math.isnan(d) for d in differences) else max(differences)


def train(optimizer: ShardOptimizer, shards: Sequence[Shard], steps: int, *, learning_rate: float) -> None:
    """Steps 1 to `steps` on drawn gradients, given at twice their size with scale a half; step 2 leaves conv out."""
    for step in range(1, steps + 1):
        set_gradients(shards, draw(100 + step, 2.0, shards[0].master.dtype if shards else torch.float64))
        optimizer.step(learning_rate, 0.5, unused(step))


def unused(step: int) -> frozenset[str]:
    return frozenset({"conv.weight"}) if step == 2 else frozenset()


def adapted(value: Tensor) -> bool:
    return value.ndim >= 2


def reference_lamb(
    steps: int, learning_rate: float, decay: float, betas: tuple[float, float], epsilon: float
) -> dict[str, Tensor]:
    weights = draw(0)
    first, second = ({n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    counts = dict.fromkeys(weights, 0)
    for step in range(1, steps + 1):
        for name, g in draw(100 + step).items():
            if name in unused(step):
                continue
            counts[name] += 1
            w = weights[name]
            first[name] = betas[0] * first[name] + (1 - betas[0]) * g
            second[name] = betas[1] * second[name] + (1 - betas[1]) * g * g
            corrected = first[name] / (1 - betas[0] ** counts[name])
            u = corrected / ((second[name] / (1 - betas[1] ** counts[name])).sqrt() + epsilon) + decay * w
            ratio = w.norm() / u.norm() if adapted(w) else 1.0
            weights[name] = w - learning_rate * ratio * u
    return weights


def reference_lars(steps: int, learning_rate: float, decay: float, momentum: float) -> dict[str, Tensor]:
    weights = draw(0)
    velocity = {n: torch.zeros_like(w) for n, w in weights.items()}
    for step in range(1, steps + 1):
        for name, g in draw(100 + step).items():
            if name in unused(step):
                continue
            w = weights[name]
            trust = 0.001 * w.norm() / (g.norm() + decay * w.norm()) if adapted(w) else 1.0
            d = learning_rate * trust * (g + decay * w)
            velocity[name] = momentum * velocity[name] + d
            weights[name] = w - (velocity[name])
    return weights


def reference_adafactor(steps: int, learning_rate: float, decay: float, *, relative: bool = False) -> dict[str, Tensor]:
    weights = draw(0)
    rows = {n: torch.zeros(w.shape[:-1], dtype=w.dtype) for n, w in weights.items()}
    columns = {n: torch.zeros(w.shape[:-2] + w.shape[-1:], dtype=w.dtype) for n, w in weights.items()}
    variances = {n: torch.zeros_like(w) for n, w in weights.items()}
    counts = dict.fromkeys(weights, 0)
    for step in range(1, steps + 1):
        for name, g in draw(100 + step).items():
            if name in unused(step):
                continue
            counts[name] += 1
            w, beta = weights[name], 1 - counts[name] ** -0.8
            squares = g * g + 1e-30
            if w.ndim >= 2:
                rows[name] = beta * rows[name] + (1 - beta) * squares.mean(-1)
                columns[name] = beta * columns[name] + (1 - beta) * squares.mean(-2)
                level = rows[name].mean(-1)[..., None, None]
                estimate = rows[name][..., :, None] * columns[name][..., None, :] / level
            else:
                variances[name] = estimate = beta * variances[name] + (1 - beta) * squares
            u = g / estimate.sqrt()
            u = u / max(1.0, float(u.square().mean().sqrt()))
            rate = learning_rate
            if relative:
                rate = max(1e-3, float(w.square().mean().sqrt())) * min(learning_rate, counts[name] ** -0.5)
            weights[name] = w - rate * decay * w - rate * u
    return weights
