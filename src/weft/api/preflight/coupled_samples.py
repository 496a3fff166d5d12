"""Samples that meet: a forward or a loss in which what is made of a sample depends on the others of its batch.

Data ranks and microbatches each see a part of the batch, so they would compute something else than one process, without
a word.  A few samples are tried before training, together and in two parts: where every sample goes by itself, the loss
of the parts adds up to that of the whole.  Where the loss alone lets them meet (InfoNCE), it is a loss of the whole
batch, whose samples data ranks gather.  Batch norms have a rule of their own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from weft.api.batches.losses import LossOfUser
from weft.api.preflight.sample_trials import TrialOutputs, Trials, difference, is_costly, mean_of
from weft.api.preflight.trial_copies import LOSS, TrialCopy
from weft.config.plan import Plan
from weft.errors import PlanError
from weft.model.blueprint import Batch
from weft.model.meta_forward.copied_calls import copied_call
from weft.techniques.data.find_whole_batch import GatheredBatch, Gathering, WholeBatch, find_whole_batch, gathered
from weft.techniques.randomness.draws import is_alone

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Share of a loss that adding in another order may change."""
_COARSE = 5e-2
"""The same tolerance in bf16 and fp16, and where a loss rounds by itself."""


_ROUGHLY = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The same tolerance of outputs that no model has computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCoupling:
    """The place where samples meet, and its consequence for plans."""

    where: str = ""
    """The loss, or the forward of a module, as the beginning of a sentence; empty: nowhere."""
    figures: str = ""
    """The losses that were compared: together and in parts."""
    no_gathering: str = ""
    """Why data ranks cannot gather the samples that meet in the loss; empty: they can."""

    @property
    def in_loss(self) -> bool:
        return self.where == LOSS


def find_coupling(trials: Trials, *, is_declared: bool) -> SampleCoupling:
    """Try a few samples.  Raises whatever the model's forward raises.

    `is_declared`: the loss says by itself that it sees the whole batch, and what is asked is whether it can.
    """
    # A loss that is a sum over samples adds up: loss(a and b) = loss(a) + loss(b).
    whole, *parts = trials.seen or _tried(trials)
    if not is_declared and not _meet(trials, whole, parts):
        unit, is_kept, more = trials.part, trials.seen is None, _more(trials, whole)
        if more is not None:
            trials, (whole, *parts) = more
        # A few samples may agree by chance: look at more, then at outputs of extreme losses, before samples count as
        # apart.
        if more is None or not _meet(trials, whole, parts):
            return _at_extremes(trials, whole, parts, unit, is_kept=is_kept)
    where, reason = _where(trials), _why_no_gathering(trials)
    figures = f"{whole.mean:.6g} and {mean_of(parts):.6g}"
    if where != LOSS and not reason:  # of two encoders whose outputs a forward multiplies, ranks gather the operands
        where = LOSS
    return SampleCoupling(where=where, figures=figures, no_gathering=reason)


_MOST_SAMPLES, _MOST_NUMBERS = 32, 1 << 22
"""Samples that a second look takes, and numbers in what the model may return for them."""


def _more(trials: Trials, whole: TrialOutputs) -> tuple[Trials, list[TrialOutputs]] | None:
    """A look at more of the batch: a mean over tokens is one over samples, too, while all have equally many.

    None where it would take long, there are no more, or the model or the loss do not take them together.
    """
    grown = trials.grown(_MOST_SAMPLES // 2)
    numbers = sum(number.numel() for number in whole.numbers) * grown.part // trials.part
    if grown.part == trials.part or numbers > _MOST_NUMBERS or is_costly(grown, share=0.1):
        return None
    try:
        return grown, _tried(grown)
    except Exception:  # batches of a shape that only few samples have
        return None


def _at_extremes(
    trials: Trials, whole: TrialOutputs, parts: Sequence[TrialOutputs], unit: int, *, is_kept: bool
) -> SampleCoupling:
    """Return the coupling that samples of very unlike losses show, beside each other and alone."""
    limit, coupling = _ROUGHLY.get(trials.dtype, _COARSE), None
    with suppress(Exception), trials.without_draws():  # whatever a loss raises of few samples and made-up outputs
        pairs = extremes_of(trials, whole, parts[0], unit, is_kept=is_kept)
        coupling = next((pair for pair in pairs if difference(*pair) > limit), None)
    if coupling is None:
        return SampleCoupling()
    figures = f"{coupling[0].mean:.6g} and {mean_of(coupling[1]):.6g}"
    return SampleCoupling(where=LOSS, figures=figures, no_gathering=_why_no_gathering(trials))


def _meet(trials: Trials, whole: TrialOutputs, parts: Sequence[TrialOutputs]) -> bool:
    """Whether the loss of the parts does not add up to that of the whole."""
    return not _adds_up(whole, parts, trials.dtype) and _is_confirmed(trials, whole, parts)


def _tried(trials: Trials) -> list[TrialOutputs]:
    """Return the results of all samples together, and of the parts."""
    with trials.without_draws():
        return [trials.run(trials.copied(), batch) for batch in (trials.fields, trials.first, trials.second)]


def refuse_coupling(coupling: SampleCoupling, plan: Plan) -> None:
    """Refuse a plan under which samples that meet would be apart.

    Raises:
        PlanError: it is such a plan.
    """
    if is_alone(plan) or not coupling.where:
        return
    apart = plan.mesh.data > 1 or plan.mesh.context > 1
    is_split = plan.microbatch.is_split
    if not coupling.in_loss and (apart or is_split):
        raise PlanError(
            f"{coupling.where} lets the samples of a batch meet: the first samples give a loss of {coupling.figures},"
            " together and in two parts, so that data ranks and microbatches would train on something else than one"
            " process. Train on one process with the whole batch in one microbatch, or let each sample go by itself"
            " there (nn.LayerNorm, nn.GroupNorm; the statistics of nn.BatchNorm1d, 2d and 3d are shared by ranks)."
        )
    if coupling.in_loss and is_split:
        raise PlanError(
            f"the loss is no sum over samples: the first ones give {coupling.figures}, together and in two parts, so"
            f" that microbatches would train on something else than one process. Use microbatch.per_step = 1. {_MEAN}"
        )
    if coupling.in_loss and apart and coupling.no_gathering:
        raise PlanError(
            f"the loss is no sum over samples: the first ones give {coupling.figures}, together and in two parts, and"
            f" data ranks cannot gather what it sees: {coupling.no_gathering}. Train on one process with the whole"
            f" batch in one microbatch. {_MEAN}"
        )


_MEAN = "If it is a mean over something else than samples (tokens, pixels), return (sum, count)."


class WholeBatchLoss:
    """A loss that says of itself what was found: that it sees the whole batch."""

    per_sample = False

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self._loss = loss
        self.auxiliary: Any = getattr(loss, "auxiliary", {})

    def __call__(self, outputs: Any, batch: Any) -> Any:
        return self._loss(outputs, batch)


def _adds_up(whole: TrialOutputs, parts: Sequence[TrialOutputs], dtype: torch.dtype) -> bool:
    return difference(whole, parts) <= _ROUNDING.get(dtype, _COARSE)


def _is_confirmed(trials: Trials, whole: TrialOutputs, parts: Sequence[TrialOutputs]) -> bool:
    """Whether samples meet in fp64, too, where roundings cannot be taken for it; else whether they do by far."""
    if trials.dtype == torch.float64:
        return True
    wide = replace(trials, is_wide=True, fields=_widened(trials.fields), own=set(trials.own), seen=None)
    try:
        seen = _tried(wide)
    except Exception:  # a forward or a loss that asks for its own dtype
        return difference(whole, parts) > _COARSE
    return not _adds_up(seen[0], seen[1:], torch.float32)  # a forward may go on in fp32 by itself


def _widened(fields: Batch) -> Batch:
    return {name: value.double() if value.is_floating_point() else value for name, value in fields.items()}


# ── where ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _ModuleCalls:
    """Inputs and outputs of every module, in the order in which calls end."""

    found: list[tuple[str, list[Tensor], list[Tensor]]] = field(
        default_factory=list[tuple[str, list[Tensor], list[Tensor]]]
    )

    def watch(self, copied: TrialCopy) -> None:
        for name, module in copied.model.named_modules():
            module.register_forward_hook(partial(self._note, name), with_kwargs=True)

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        self.found.append((name, _tensors((args, kwargs)), _tensors(outputs)))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _where(trials: Trials) -> str:
    """The first module that is given samples which have not met, and returns some that have; else the loss."""
    seen = [_ModuleCalls(), _ModuleCalls(), _ModuleCalls()]
    with trials.without_draws():
        for calls, batch in zip(seen, (trials.fields, trials.first, trials.second), strict=True):
            copied = trials.copied()
            calls.watch(copied)
            trials.forward(copied, batch)
    kind = type(trials.blueprint.module).__name__
    # A forward that calls other modules for other samples cannot be compared module by module.
    if len({len(calls.found) for calls in seen}) > 1:
        return f"the forward of {kind}"
    for (name, inputs, made), first, second in zip(*(calls.found for calls in seen), strict=True):
        if _joins(inputs, first[1], second[1], trials.dtype) and not _joins(made, first[2], second[2], trials.dtype):
            return f"the forward of {name} in {kind}" if name else f"the forward of {kind}"
    return LOSS


def _joins(whole: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether tensors of two parts, one behind the other, are those of the whole; sums over samples are left out."""
    if not len(whole) == len(first) == len(second):
        return False
    for together, *parts in zip(whole, first, second, strict=True):
        # As large for half of the samples: a sum over them, which says nothing here.
        if together.shape == parts[0].shape:
            continue
        if together.dim() != parts[0].dim():
            return False
        dims = [dim for dim, sizes in enumerate(zip(together.shape, parts[0].shape, strict=True)) if len({*sizes}) > 1]
        if len(dims) != 1 or not _is_close(together, torch.cat(parts, dims[0]), dtype):
            return False
    return True


def _is_close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    difference = float((one.double() - other.double()).nan_to_num().norm())
    return difference <= _ROUNDING.get(dtype, _COARSE) * float(one.double().nan_to_num().norm())


# ── gathering ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _why_no_gathering(trials: Trials) -> str:
    """Why data ranks cannot gather what the loss sees; empty: both parts gave the loss of the whole when they did."""
    known = LossOfUser(WholeBatchLoss(trials.loss))
    known.like = trials.like
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the user's loss are shown when training calls it
        whole = find_whole_batch(replace(trials.blueprint, loss=known, example=trials.example))
    if whole.reason:
        return whole.reason
    if known.auxiliary:
        return "it has auxiliary terms, which are sums over samples"
    with trials.without_draws():
        return "" if _gathers(trials, whole) else "the samples meet in the forward, before its outputs"


def _gathers(trials: Trials, whole: WholeBatch) -> bool:
    """Whether each of two ranks, with half of the samples each, would see the loss of the whole."""
    operands: list[Tensor] = []
    copied = trials.copied()
    with Gathering(whole.products, lambda tensor, dim: _kept(tensor, operands)):
        outputs = trials.forward(copied, trials.fields)
    gathered(outputs, whole.outputs, lambda tensor, dim: _kept(tensor, operands))
    # Each simulated rank gets the other's values as they were recorded, so no process group is needed.
    expected = trials.judged(copied, outputs, trials.fields)
    for start, batch in ((0, trials.first), (trials.part, trials.second)):
        rank = _SimulatedRank(trials, batch, start, list(operands))
        if not _adds_up(expected, [rank.loss(whole)], trials.dtype) or rank.differs:
            return False
    return True


@dataclass(slots=True)
class _SimulatedRank:
    """One of two ranks in this process; it is given the values that both would gather."""

    trials: Trials
    batch: Batch
    start: int
    rest: list[Tensor]
    """Values to be gathered next, of all samples."""
    differs: bool = False
    """Whether its own part of something was another than of the whole."""

    def loss(self, whole: WholeBatch) -> TrialOutputs:
        copied = self.trials.copied()
        with Gathering(whole.products, self._gather):
            outputs = self.trials.forward(copied, self.batch)
        outputs = gathered(outputs, whole.outputs, self._gather)
        names = {id(value): name for name, value in self.batch.items()}
        fields = GatheredBatch(self.batch, lambda own, dim: self.trials.fields[names[id(own)]])
        return self.trials.judged(copied, outputs, fields)

    def _gather(self, own: Tensor, dim: int) -> Tensor:
        every = self.rest.pop(0)
        mine = every.narrow(dim, self.start, self.trials.part)
        self.differs |= not _is_close(mine, own, self.trials.dtype)
        return every


def _kept(tensor: Tensor, into: list[Tensor]) -> Tensor:
    into.append(tensor)
    return tensor


_DESCENTS = 12
"""Steps by which outputs are led to a smaller loss."""


def extremes_of(
    trials: Trials, whole: TrialOutputs, part: TrialOutputs, unit: int, *, is_kept: bool
) -> Iterator[tuple[TrialOutputs, Sequence[TrialOutputs]]]:
    """Yield what the loss makes of two groups of samples of very unlike losses together, and of each alone.

    A mean that a loss clamps, or takes the absolute value of, is a sum over samples as long as all of them lie on one
    side.  So the samples of the least and of the largest loss are laid beside each other, and the former are given
    outputs as a training would, down to a loss of nearly nothing.  Nothing is run but the loss.

    `whole`, `part`: what came of all samples, and of the first part; `unit`: samples that belong together; `is_kept`:
    the loss may keep something from call to call.  Raises what the loss raises.
    """
    dims, judge = _rows_of(whole.outputs, part.outputs), _LossComparison(trials, is_kept=is_kept)
    # Groups of `unit` samples: pairs, for instance, must stay together.
    starts = range(0, 2 * trials.part - unit + 1, unit)
    groups = [_chosen(trials, whole.outputs, dims, range(start, start + unit)) for start in starts]
    seen = [(judge.seen(*group), group) for group in groups]
    ranked = sorted((output for output in seen if math.isfinite(output[0].mean)), key=lambda each: each[0].mean)
    (least, (outputs, batch)), (largest, (others, rest)) = ranked[0], ranked[-1]
    fields = {name: torch.cat([value, rest[name]]) for name, value in batch.items()}
    yield judge.seen(_joined(outputs, others, dims), fields), [least, largest]
    if trials.fields["sample_ids"].device.type != "cpu":
        return  # outputs that nobody computed may end a device's process (a probability above 1)
    for lower in _descending(judge, outputs, dims, batch):
        yield judge.seen(_joined(lower, others, dims), fields), [judge.seen(lower, batch), largest]


class _LossComparison:
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

    def seen(self, outputs: Any, batch: Batch) -> TrialOutputs:
        """Return outputs with their loss."""
        loss_sum, count = self.loss()(outputs, batch)
        return TrialOutputs(outputs, float(loss_sum.detach()), float(count.detach()))


def _descending(judge: _LossComparison, outputs: Any, dims: Sequence[int | None], batch: Batch) -> Iterator[Any]:
    """Outputs of less and less loss: steps towards none at all, each as long as the slope says."""
    for _ in range(_DESCENTS):
        leaves, tree = tree_flatten(outputs)
        along = iter(dims)
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _learns(leaf, next(along))]
        for at in places:
            leaves[at] = leaves[at].detach().requires_grad_()
        total, count = judge.loss()(tree_unflatten(leaves, tree), batch)
        gradients = torch.autograd.grad(total / count, [leaves[at] for at in places], allow_unused=True)
        slopes = cast("tuple[Tensor | None, ...]", gradients)
        square = sum(float(slope.square().sum()) for slope in slopes if slope is not None)
        if not square > 0 or not math.isfinite(square):
            return
        # Newton's step for a root: loss / |gradient|² along the gradient would reach 0 if the loss were linear.
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
    """Return the model's outputs for some of the samples, and their rows of the batch."""
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
