"""A few samples on trial before training: together, and in two parts, each on a copy of the model and its loss.

Every draw gives fixed numbers, and writes to weights are seen and taken back.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from weft.api.batches.batch_shape import BatchShape, taken_apart
from weft.api.batches.losses import LossOfUser
from weft.api.batches.stream import UserBatch
from weft.api.preflight.trial_copies import KeptObject, TrialCopy
from weft.config.plan import Plan
from weft.model.blueprint import Batch, Blueprint
from weft.model.positions import call_model
from weft.techniques.core import compute_dtype_of, model_inputs
from weft.techniques.core._draw_net import DrawMode

_SHARE = 0.75
"""Share of the range or the deviation of what is drawn."""


@contextlib.contextmanager
def on_trial(weights: Mapping[str, nn.Parameter]) -> Generator[WrittenWeights]:
    """Run forwards and losses without draws, words and traces: generators and `weights` are as before at the end.

    Yields what was written to weights, known at the end.
    """
    written = WrittenWeights(weights)
    states = random.getstate(), np.random.get_state()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            torch.random.fork_rng(devices={p.device for p in weights.values() if p.is_cuda}),
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
            _FixedDraws(written),
        ):
            warnings.simplefilter("ignore")
            yield written
    finally:
        written.take_back()
        random.setstate(states[0])
        np.random.set_state(states[1])


class WrittenWeights:
    """The weights that were written to; their values are kept from before the first write."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self.names: set[str] = set()
        self._weights = weights
        self._storages = {_storage(parameter): name for name, parameter in weights.items()}
        self._data = {name: parameter.data for name, parameter in weights.items()}
        self._kept: dict[str, Tensor] = {}

    def about_to_write(self, tensor: Tensor) -> None:
        name = self._storages.get(_storage(tensor))
        # Before the first write alone: then the values are still those from outside.
        if name is not None and name not in self._kept:
            self._kept[name] = self._data[name].clone()
            self.names.add(name)

    def take_back(self) -> None:
        with torch.no_grad():
            for name, before in self._data.items():
                if self._weights[name].data_ptr() != before.data_ptr():  # given another tensor: `weight.data = …`
                    self._weights[name].data = before
                    self.names.add(name)
            for name, values in self._kept.items():
                self._data[name].copy_(values)
        self._kept.clear()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # meta storages have no address


class _FixedDraws(DrawMode):
    """Answers draws with fixed numbers, the same for every sample, and says what is about to be written to."""

    def __init__(self, written: WrittenWeights) -> None:
        super().__init__(_fixed)
        self._written = written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for leaf in tree_leaves(value):
                        if isinstance(leaf, Tensor):
                            self._written.about_to_write(leaf)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _fixed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    kwargs = {**kwargs, "generator": None} if "generator" in kwargs else kwargs
    if name == "native_dropout":  # a rate that changes from forward to forward shows
        return args[0] * (1.0 + float(args[1])), torch.ones_like(args[0], dtype=torch.bool)
    if name == "randperm":  # one that moves every sample
        return func(*args, **kwargs).sort(descending=True)[0]
    arguments = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(
        kwargs
    )
    result = func(*args, **kwargs)
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            with torch.no_grad():
                leaf.fill_(_value(name, leaf, arguments))
    return result


def _value(name: str, drawn: Tensor, arguments: Mapping[str, Any]) -> float:
    if name.startswith("bernoulli"):
        return 1.0
    if drawn.is_floating_point() or drawn.is_complex():
        low, high = (arguments.get(each) for each in (("mean", "std") if "normal" in name else ("from", "to")))
        low, high = (each if isinstance(each, int | float) else other for each, other in ((low, 0.0), (high, 1.0)))
        return low + _SHARE * (high if "normal" in name else high - low)
    low = arguments.get("low", arguments.get("from", 0))
    return float(low) if isinstance(low, int) else 0.0


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Classes of batch norms, which Weft keeps by a rule of their own."""

_LARGEST_PART = 8
_LEAST = 1e-2
"""Loss of a sample that a rounding is held against at least: those of copies that cancel out leave nothing else."""


@dataclass(frozen=True, slots=True)
class TrialOutputs:
    """The outputs of one forward."""

    outputs: Any
    loss_sum: float
    count: float

    @property
    def mean(self) -> float:
        return self.loss_sum / self.count if self.count else math.nan

    @property
    def numbers(self) -> list[Tensor]:
        leaves = [leaf.detach() for leaf in tree_leaves(self.outputs) if isinstance(leaf, Tensor)]
        return [*leaves, torch.tensor([self.loss_sum, self.count], dtype=torch.float64)]


def mean_of(parts: Sequence[TrialOutputs]) -> float:
    count = sum(part.count for part in parts)
    return sum(part.loss_sum for part in parts) / count if count else math.nan


def difference(whole: TrialOutputs, parts: Sequence[TrialOutputs]) -> float:
    """How far the loss of the whole is from that of the parts, relative; 0 where it is no number."""
    sums, counts = [part.loss_sum for part in parts], [part.count for part in parts]
    if not all(map(math.isfinite, (whole.loss_sum, whole.count, *sums, *counts))):
        return 0.0
    least = _LEAST * max(1.0, abs(whole.count))
    # Relative to the largest sum in question: losses of both signs may cancel in the whole.
    size = max(abs(whole.loss_sum), *map(abs, sums), least)
    by_sum = max(abs(whole.loss_sum - sum(sums)) / size, abs(whole.count - sum(counts)) / (abs(whole.count) or 1.0))
    if not whole.count or not sum(counts):
        return by_sum
    by_mean = abs(whole.mean - mean_of(parts)) * abs(whole.count) / size
    return min(by_sum, by_mean)  # a mean beside the count 1 is weighted right, where parts are equal


@dataclass(slots=True)
class Trials:
    """The runs of a few samples, and how to make more."""

    blueprint: Blueprint
    loss: Callable[..., Any]
    like: BatchShape
    fields: Batch
    part: int
    """Samples of each of the two parts."""
    rest: Batch = field(default_factory=dict[str, Tensor])
    """Every sample of the batch, from the first on; empty: nobody asks for more."""
    own: set[str] = field(default_factory=set[str])
    """Weights that a forward writes to."""
    is_wide: bool = False
    """Whether everything is computed in fp64."""
    seen: tuple[TrialOutputs, TrialOutputs, TrialOutputs] | None = None
    """Outputs of all samples together, of the first part and of the second, where no state was left behind."""

    @property
    def first(self) -> Batch:
        return {name: value[: self.part] for name, value in self.fields.items()}

    @property
    def second(self) -> Batch:
        return {name: value[self.part :] for name, value in self.fields.items()}

    def example(self, number: int) -> Batch:
        """A batch without values, with every field of the data: a recipe's own model names its inputs alone."""
        fields = {name: value for name, value in self.fields.items() if name != "sample_ids"}
        empty = {
            name: torch.empty((number, *value.shape[1:]), dtype=value.dtype, device="meta")
            for name, value in fields.items()
        }
        return empty if self.blueprint.example is None else empty | self.blueprint.example(number)

    def grown(self, part: int) -> Trials:
        """Return the same trials with as many samples as the batch has, at most `part` in each part."""
        number = len(next(iter(self.rest.values()), ()))
        # A multiple of the old part, so that samples that belong together stay so.
        part = min(part, number // 2) // self.part * self.part
        if part <= self.part:
            return self
        device = self.fields["sample_ids"].device
        fields = {name: value[: 2 * part].to(device, copy=True) for name, value in self.rest.items()}
        fields["sample_ids"] = torch.arange(2 * part, device=device)
        return replace(self, fields=fields, part=part, own=set(self.own), seen=None)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.is_wide else compute_dtype_of(self.blueprint.module) or torch.float32

    @property
    def flops(self) -> float:
        """Roughly what the forwards of a look cost: every weight for every position of a sample."""
        weights = sum(parameter.numel() for parameter in self.blueprint.module.parameters())
        whole = [value for value in self.fields.values() if not value.is_floating_point()]
        positions = max((value[0].numel() for value in whole), default=1)
        return 2.0 * weights * max(positions, 1) * 4 * self.part

    def copied(self) -> TrialCopy:
        """A copy in training, whose batch norms see each sample by itself."""
        model = self.blueprint.module
        names = [name for name, _ in model.named_parameters()] if self.is_wide else self.own
        made = TrialCopy(model, self.loss, names)
        if not model.training:  # as models of a library come: a loop switches them on
            made.model.train()
        if self.is_wide:
            made.model.double()
        for module in made.model.modules():
            if isinstance(module, _NORMS):
                module.forward = _each_by_itself
        return made

    def run(self, copied: TrialCopy, batch: Batch) -> TrialOutputs:
        """Return the outputs of one forward, with its loss."""
        batch = {name: value.clone() for name, value in batch.items()}  # which a forward may write to
        outputs = self.forward(copied, batch)
        return self.judged(copied, outputs, batch)

    def forward(self, copied: TrialCopy, batch: Batch) -> Any:
        # Draws of Python and NumPy are the same in every forward.
        random.seed(0)
        np.random.seed(0)
        dtype = self.dtype if self.is_wide else compute_dtype_of(copied.model)
        return call_model(copied.model, model_inputs(self.blueprint, batch, dtype))

    def judged(self, copied: TrialCopy, outputs: Any, batch: Batch) -> TrialOutputs:
        loss = LossOfUser(copied.loss)
        loss.like = self.like
        loss_sum, count = loss(outputs, batch)
        return TrialOutputs(outputs, float(loss_sum.detach()), float(count.detach()))

    @contextmanager
    def without_draws(self) -> Generator[None]:
        """Run forwards within that draw nothing; weights are as before afterwards."""
        weights = dict(self.blueprint.module.named_parameters())
        with _no_zeros(weights), on_trial(weights) as written:
            yield
        self.own |= written.names


_MOST_FLOPS = 5e11
"""Largest look at a model in this host's memory, which takes about 10 s."""


def is_costly(trials: Trials, share: float = 1.0) -> bool:
    """Whether a look would take too long: more than that share of what one may take."""
    on_host = next(iter(trials.fields.values())).device.type == "cpu"
    return on_host and trials.flops > share * _MOST_FLOPS


def trials_of(blueprint: Blueprint, loss: Callable[..., Any], example: UserBatch, part: int) -> Trials | None:
    """Trials of the first samples of a batch; None where there are too few."""
    device = next((parameter.device for parameter in blueprint.module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        return None
    whole, shape = taken_apart(example)
    fields = {name: value[: 2 * part].to(device, copy=True) for name, value in whole.items()}
    number = next(iter(fields.values())).shape[0]
    fields["sample_ids"] = torch.arange(number, device=device)
    return Trials(blueprint, loss, shape, fields, part, rest=whole) if number == 2 * part else None


def part_of(plan: Plan | None) -> int:
    """Samples of a part: as few as keep together what a microbatch keeps (pairs, triples)."""
    size = plan.microbatch.size if plan is not None else 2
    factors = [number for number in range(2, _LARGEST_PART + 1) if size % number == 0]
    return next(iter(factors), 1 if plan is not None else 2)


def changed(
    one: Mapping[KeptObject, Any], other: Mapping[KeptObject, Any], alike: Callable[[KeptObject], bool]
) -> list[KeptObject]:
    """Return the entries that only one of two states has, or that differ."""
    every: Collection[KeptObject] = dict.fromkeys([*other, *one])
    return [kept for kept in every if not (kept in one and kept in other and alike(kept))]


def _each_by_itself(input: Tensor) -> Tensor:
    """A stand-in for a batch norm that normalises each sample by itself."""
    dims = list(range(1, input.dim()))
    return input / (input.square().mean(dims, keepdim=True) + 1e-5).sqrt()


@contextmanager
def _no_zeros(weights: Mapping[str, nn.Parameter]) -> Generator[None]:
    """Small numbers in place of weights that begin at zero, which would hide what a forward does."""
    zeros = [
        weight
        for weight in weights.values()
        if weight.is_floating_point() and weight.numel() and not weight.detach().any()
    ]
    kept = [zero.data for zero in zeros]
    for place, zero in enumerate(zeros):
        numbers = torch.arange(zero.numel(), dtype=torch.float64, device=zero.device)
        zero.data = (0.02 * torch.sin(12.9898 * numbers + place)).view(zero.shape).to(zero.dtype)
    try:
        yield
    finally:
        for zero, before in zip(zeros, kept, strict=True):
            zero.data = before
