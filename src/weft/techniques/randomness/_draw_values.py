"""Keyed numbers for draws: hashes of (seed, step, sample, layer, element of the whole activation), and what each of
ATen's random operators makes of such numbers in place of a generator's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.techniques.randomness.keyed_dropout import GOLDEN, RESOLUTION, kept_rows, mix

MANTISSA = 53
COARSE = 1e-3
"""A probability that 16 bits give to this relative accuracy is drawn with 16 bits."""


class Numbers(Protocol):
    """Numbers for the elements of a draw that this rank holds, (samples, …)."""

    def uniform(self, salt: int = 0) -> Tensor:
        """fp64 in [0, 1)."""
        ...

    def normal(self) -> Tensor:
        """fp64 of mean 0 and deviation 1."""
        ...

    def kept(self, probability: float) -> Tensor:
        """bool, true with `probability`."""
        ...


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of one draw that this rank holds, sample by sample."""

    samples: Tensor
    """int64 words of the samples, (samples,), keyed by seed, step and layer."""
    starts: Sequence[int]
    """First index along each dim of a sample's whole activation."""
    sizes: Sequence[int]
    """Indices held along each dim."""
    whole: Sequence[int]
    """Sizes of a sample's whole activation."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.samples.numel(), *self.sizes)

    def _rows(self) -> Tensor:
        """Numbers of the held rows (all dims but the last) in the whole, 1-D."""
        rows = torch.zeros(1, dtype=torch.int64, device=self.samples.device)
        for start, size, whole in list(zip(self.starts, self.sizes, self.whole, strict=True))[:-1]:
            here = torch.arange(start, start + size, device=self.samples.device)
            rows = (rows[:, None] * whole + here).flatten()
        return rows

    def _last(self) -> tuple[int, int]:
        return (self.starts[-1], self.sizes[-1]) if self.sizes else (0, 1)

    def words(self, salt: int = 0) -> Tensor:
        """int64 of `shape`."""
        start, width = self._last()
        columns = torch.arange(start, start + width, device=self.samples.device)
        rows = mix(mix(self.samples + salt)[:, None] + self._rows() * GOLDEN)
        return mix(rows[..., None] + columns * GOLDEN).view(self.shape)

    def uniform(self, salt: int = 0) -> Tensor:
        """fp64 in [0, 1) of `shape`."""
        return uniform_of(self.words(salt))

    def normal(self) -> Tensor:
        """fp64 of mean 0 and deviation 1 (Box and Muller 1958)."""
        radius = self.uniform(1).neg_().log1p_().mul_(-2.0).sqrt_()
        return radius.mul_(self.uniform(2).mul_(2 * math.pi).cos_())

    def kept(self, probability: float) -> Tensor:
        """bool of `shape`, true with `probability`."""
        dropped = dropped_of(probability)
        if not dropped:
            return self.uniform() < probability
        start, width = self._last()
        return kept_rows(self.samples, self._rows(), (start, start + width), dropped).reshape(self.shape)


def dropped_of(probability: float) -> int:
    """Return how many of `RESOLUTION` elements are dropped where each is kept with `probability`; 0: that is too
    coarse, and each is drawn by itself."""
    dropped = round((1.0 - probability) * RESOLUTION)
    error = abs(dropped / RESOLUTION - (1.0 - probability))
    return dropped if 0 < dropped < RESOLUTION and error <= COARSE * min(probability, 1.0 - probability) else 0


def uniform_of(words: Tensor) -> Tensor:
    """Return words as numbers, fp64 in [0, 1)."""
    return ((words >> (64 - MANTISSA)) & ((1 << MANTISSA) - 1)).to(torch.float64).mul_(2.0**-MANTISSA)


@dataclass(frozen=True, slots=True)
class Joined:
    """Numbers for several runs of tokens, one behind another along a dim; see `Numbers`."""

    parts: Sequence[Elements]
    dim: int

    def uniform(self, salt: int = 0) -> Tensor:
        """See `Numbers`."""
        return torch.cat([part.uniform(salt) for part in self.parts], self.dim)

    def normal(self) -> Tensor:
        """See `Numbers`."""
        return torch.cat([part.normal() for part in self.parts], self.dim)

    def kept(self, probability: float) -> Tensor:
        """See `Numbers`."""
        return torch.cat([part.kept(probability) for part in self.parts], self.dim)


# ── operators ─────────────────────────────────────────────────────────────────────────────────────────────────────────

Arrange = Callable[[Tensor], Tensor]
"""Brings numbers of shape (samples, …) into the shape of the draw."""


def shape_of_draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Size, torch.device]:
    """Return the shape of what an operator draws, and the device, without drawing."""
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if operands:
        is_normal = func.overloadpacket.__name__ == "normal"
        like = torch.broadcast_tensors(*operands)[0] if is_normal else operands[0]
        return like.shape, operands[0].device
    arguments = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(
        kwargs
    )
    size = arguments["size"] if "size" in arguments else (arguments["n"],)  # of a permutation
    return torch.Size(size), torch.device(kwargs.get("device") or "cpu")


def keyed_value(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Any:
    """Return what `func` gives; None for an operator that is not known here."""
    name = func.overloadpacket.__name__
    schema = func._schema.arguments
    arguments = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    arguments |= {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
    special = _SPECIAL.get(name)
    if special is not None:
        return special(arguments, elements, arrange)
    make = _MAKERS.get(name.removesuffix("_").removesuffix("_like").removesuffix("_functional"))
    if make is None:
        return None
    in_place = name.endswith("_") and not name.endswith("__")
    values = make(arguments, elements, arrange)
    return _placed(arguments, values, args[0] if in_place else None, args)


def _placed(arguments: Mapping[str, Any], values: Tensor, target: Tensor | None, args: Sequence[Any]) -> Tensor:
    """In the place that the operator writes to, or in the dtype that it returns."""
    target = arguments.get("out", target)
    if isinstance(target, Tensor):
        return target.copy_(values)
    like = next((arg for arg in args if isinstance(arg, Tensor)), None)
    asked = arguments.get("dtype")
    dtype = asked if isinstance(asked, torch.dtype) else like.dtype if like is not None else None
    if dtype is None:
        dtype = torch.get_default_dtype() if values.is_floating_point() or values.dtype == torch.bool else values.dtype
    return values.to(dtype)


def _bernoulli(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Tensor:
    p = arguments.get("p", arguments["self"])
    if isinstance(p, Tensor):
        return arrange(elements.uniform()) < p
    return arrange(elements.kept(float(p)))


def _uniform(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Tensor:
    low, high = float(arguments.get("from", 0.0)), float(arguments.get("to", 1.0))
    return arrange(elements.uniform()) * (high - low) + low


def _normal(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Tensor:
    mean, deviation = arguments.get("mean", 0.0), arguments.get("std", 1.0)
    return arrange(elements.normal()) * deviation + mean


def _log_normal(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Tensor:
    return _normal(arguments, elements, arrange).exp()


def _exponential(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Tensor:
    smallest = 2.0**-54  # as torch's own, never 0: callers take logarithms
    return arrange(elements.uniform()).neg_().log1p_().neg_().clamp_(min=smallest) / float(arguments.get("lambd", 1.0))


def _cauchy(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Tensor:
    turned = torch.tan(math.pi * (arrange(elements.uniform()) - 0.5))
    return turned * float(arguments.get("sigma", 1.0)) + float(arguments.get("median", 0.0))


def _geometric(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Tensor:
    return (arrange(elements.uniform()).neg_().log1p_() / math.log1p(-float(arguments["p"]))).ceil_().clamp_(min=1)


def _integers(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Tensor:
    low, high = int(arguments.get("low", 0) or 0), int(arguments["high"])
    return (arrange(elements.uniform()) * (high - low)).floor_().to(torch.int64) + low


def _permutation(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Tensor:
    return arrange(elements.uniform()).argsort()


def _random(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Tensor:
    dtype = arguments["self"].dtype
    whole = {torch.float32: 1 << 24, torch.float16: 1 << 11, torch.bfloat16: 1 << 8, torch.bool: 2}
    high = arguments.get("to")
    if high is None:
        high = whole.get(dtype, 1 << 53) if dtype.is_floating_point or dtype == torch.bool else torch.iinfo(dtype).max
    low = int(arguments.get("from", 0) or 0)
    return (arrange(elements.uniform()) * float(int(high) - low)).floor_().to(torch.int64) + low


def _dropout(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> tuple[Tensor, Tensor]:
    x, p = arguments.get("input", arguments.get("self")), float(arguments["p"])
    assert isinstance(x, Tensor)
    keep = arrange(elements.kept(1.0 - p))
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return torch.ops.aten.native_dropout_backward(x, keep.contiguous(), scale), keep


def _leaky(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Any:
    x, low, high = arguments["self"], float(arguments["lower"]), float(arguments["upper"])
    slopes = (arrange(elements.uniform()) * (high - low) + low).to(x.dtype)
    noise = torch.where(x <= 0, slopes, torch.ones_like(slopes))
    arguments["noise"].copy_(noise)
    return x * noise


def _leaky_in_place(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Any:
    return arguments["self"].copy_(_leaky(arguments, elements, arrange))


def _leaky_functional(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Any:
    noise = arguments["noise"].clone()
    return _leaky({**arguments, "noise": noise}, elements, arrange), noise


def _multinomial(arguments: Mapping[str, Any], elements: Numbers, arrange: Arrange) -> Tensor:
    """Without replacement by a race of exponentials, with it by independent races (Efraimidis and Spirakis 2006)."""
    weights, count = arguments["self"].double(), int(arguments["num_samples"])
    if not arguments.get("replacement", False):
        arrivals = _exponential({}, elements, arrange)
        return (weights / arrivals).topk(count, dim=-1).indices
    races: list[Tensor] = []
    for number in range(count):
        arrivals = arrange(elements.uniform(number + 1)).neg_().log1p_().neg_().clamp_(min=2.0**-54)
        races.append((weights / arrivals).argmax(-1))
    return torch.stack(races, -1)


_MAKERS: Mapping[str, Callable[[Mapping[str, Any], Numbers, Arrange], Tensor]] = {
    "bernoulli": _bernoulli,
    "uniform": _uniform,
    "rand": _uniform,
    "normal": _normal,
    "randn": _normal,
    "log_normal": _log_normal,
    "exponential": _exponential,
    "cauchy": _cauchy,
    "geometric": _geometric,
    "randint": _integers,
    "randperm": _permutation,
    "random": _random,
}
_SPECIAL: Mapping[str, Callable[[Mapping[str, Any], Numbers, Arrange], Any]] = {
    "native_dropout": _dropout,
    "_fused_dropout": lambda arguments, elements, arrange: _dropout(
        {**arguments, "p": 1.0 - float(arguments["p"])}, elements, arrange
    ),
    "rrelu_with_noise": _leaky,
    "rrelu_with_noise_": _leaky_in_place,
    "rrelu_with_noise_functional": _leaky_functional,
    "multinomial": _multinomial,
}
