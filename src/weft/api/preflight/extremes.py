"""Samples of very unlike losses beside each other.

A mean that a loss clamps, or takes the absolute value of, is a sum over samples as long as all of them lie on one side.
So the samples of the least and of the largest loss are laid beside each other, and the former are given outputs as a
training would, down to a loss of nearly nothing.  Nothing is run but the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from weft.api.batches.losses import LossOfUser
from weft.api.preflight.sample_trials import Seen, Trials
from weft.model.blueprint import Batch
from weft.model.meta_forward.copied_calls import copied_call

_DESCENTS = 12
"""Steps by which outputs are led to a smaller loss."""


def extremes_of(
    trials: Trials, whole: Seen, part: Seen, unit: int, *, is_kept: bool
) -> Iterator[tuple[Seen, Sequence[Seen]]]:
    """Yield what the loss makes of two groups of samples together, and of each alone.

    `whole`, `part`: what came of all samples, and of the first part; `unit`: samples that belong together; `is_kept`:
    the loss may keep something from call to call.  Raises what the loss raises.
    """
    dims, judge = _rows_of(whole.outputs, part.outputs), _Judge(trials, is_kept=is_kept)
    starts = range(0, 2 * trials.part - unit + 1, unit)
    groups = [_chosen(trials, whole.outputs, dims, range(start, start + unit)) for start in starts]
    seen = [(judge.seen(*group), group) for group in groups]
    ranked = sorted((each for each in seen if math.isfinite(each[0].mean)), key=lambda each: each[0].mean)
    (least, (outputs, batch)), (largest, (others, rest)) = ranked[0], ranked[-1]
    fields = {name: torch.cat([value, rest[name]]) for name, value in batch.items()}
    yield judge.seen(_joined(outputs, others, dims), fields), [least, largest]
    if trials.fields["sample_ids"].device.type != "cpu":
        return  # outputs that nobody computed may end a device's process (a probability above 1)
    for lower in _descending(judge, outputs, dims, batch):
        yield judge.seen(_joined(lower, others, dims), fields), [judge.seen(lower, batch), largest]


class _Judge:
    """The loss, each time as it was at first."""

    def __init__(self, trials: Trials, *, is_kept: bool) -> None:
        self._trials, self._is_kept = trials, is_kept
        self._copied = trials.copied()
        pairs = zip(trials.blueprint.module.modules(), self._copied.model.modules(), strict=True)
        self._memo = {id(mine): its for mine, its in pairs} | {id(p): p for p in self._copied.model.parameters()}

    def loss(self) -> LossOfUser:
        """The loss by Weft's contract."""
        kept = copied_call(self._trials.loss, dict[int, Any](self._memo)) if self._is_kept else self._copied.loss
        return LossOfUser(kept, self._trials.like)

    def seen(self, outputs: Any, batch: Batch) -> Seen:
        """What it makes of outputs."""
        loss_sum, count = self.loss()(outputs, batch)
        return Seen(outputs, float(loss_sum.detach()), float(count.detach()))


def _descending(judge: _Judge, outputs: Any, dims: Sequence[int | None], batch: Batch) -> Iterator[Any]:
    """Outputs of less and less loss: steps towards none at all, each as long as the slope says."""
    for _ in range(_DESCENTS):
        leaves, tree = tree_flatten(outputs)
        along = iter(dims)
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _learns(leaf, next(along))]
        for at in places:
            leaves[at] = leaves[at].detach().requires_grad_()
        total, count = judge.loss()(tree_unflatten(leaves, tree), batch)
        found = torch.autograd.grad(total / count, [leaves[at] for at in places], allow_unused=True)
        slopes = cast("tuple[Tensor | None, ...]", found)
        square = sum(float(slope.square().sum()) for slope in slopes if slope is not None)
        if not square > 0 or not math.isfinite(square):
            return
        length = float((total / count).detach()) / square
        for at, slope in zip(places, slopes, strict=True):
            leaves[at] = (leaves[at] - (0.0 if slope is None else length * slope)).detach().requires_grad_()
        outputs = tree_unflatten(leaves, tree)
        yield outputs


def _learns(leaf: Tensor, dim: int | None) -> bool:
    return dim is not None and leaf.is_floating_point() and leaf.requires_grad


def _rows_of(whole: Any, part: Any) -> list[int | None]:
    """Along which dim of each tensor of the outputs samples lie; None: along none."""
    dims: list[int | None] = []
    of_part = iter(leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor))
    for leaf in tree_leaves(whole):
        if isinstance(leaf, Tensor):
            sizes = enumerate(zip(leaf.shape, next(of_part).shape, strict=True))
            dims.append(next((dim for dim, (every, some) in sizes if every != some), None))
    return dims


def _chosen(trials: Trials, outputs: Any, dims: Sequence[int | None], rows: range) -> tuple[Any, Batch]:
    """What the model has returned for some of the samples, and their rows of the batch."""
    along = iter(dims)

    def narrowed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (dim := next(along)) is None:
            return leaf
        return leaf.narrow(dim, rows.start, len(rows))

    batch = {name: value[rows.start : rows.stop] for name, value in trials.fields.items()}
    return tree_map(narrowed, outputs), batch


def _joined(one: Any, other: Any, dims: Sequence[int | None]) -> Any:
    """The outputs of two groups of samples as those of one batch."""
    along, rest = iter(dims), iter([leaf for leaf in tree_leaves(other) if isinstance(leaf, Tensor)])

    def joined(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        second, dim = next(rest), next(along)
        return leaf if dim is None else torch.cat([leaf, second], dim)

    return tree_map(joined, one)
