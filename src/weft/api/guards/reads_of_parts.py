"""What a loop has read of weights of which its rank has a part: a norm or an average of that is another on each rank.

It is told as a warning when it is read, and nothing may be written by it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.api.guards.state_checks import digest_of
from weft.api.ranks.agreement import SET_BY_LOOP
from weft.config.plan import Plan
from weft.errors import RecipeError

ZERO = "data_parallel.zero"
DIFFERS = "(a norm, an average) would be another on each rank. Write it as a parametrization in the model"


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A tensor that a loop can reach: a parameter of a rank's modules, or what an optimizer holds of one."""

    name: str
    tensor: Tensor
    cut_by: str
    """Setting of the plan by which the rank has a part of it; empty: it has all of it."""
    of_optimizer: bool = False


@final
class PartReads:
    """Knows what of a model's weights the loop has read, at any time: it may have kept that."""

    def __init__(self, held: Sequence[HeldWeight], parts: Iterable[nn.Module], plan: Plan) -> None:
        self._held, self._plan = {id(each.tensor): each for each in held}, plan
        self._modules = [(name, each, frozenset(vars(each))) for part in parts for name, each in part.named_modules()]
        """Modules, and the attributes that they had at first: no forward looks at what a loop notes in others."""
        self._read = dict[int, HeldWeight]()
        self._is_across = False
        """Whether anything was computed of weights that is not computed element by element."""
        self._values: dict[int, list[Tensor]] | None = None
        self._attributes: list[dict[str, str]] | None = None

    def read(self, weights: Iterable[int]) -> None:
        """The loop has computed something of these."""
        self._read |= {each: self._held[each] for each in weights if each in self._held}

    def read_across(self, weights: Iterable[int]) -> None:
        """The loop has computed something else of these than each element by itself."""
        held = [self._held[each] for each in weights if each in self._held]
        if not (of_parts := [each for each in held if each.cut_by or self._plan.mesh.pipeline > 1]):
            return
        self._read |= {id(each.tensor): each for each in of_parts}
        if not self._is_across:
            warnings.warn(self._warning(of_parts[0]), stacklevel=5)
            self._is_across = True
        if self._values is None:
            self.remember()

    def _warning(self, held: HeldWeight) -> str:
        what = f"of {held.name}" if not held.of_optimizer else f"of what the optimizer holds of {held.name}"
        cut = f"of which this rank has a part ({self._setting(held.cut_by)})" if held.cut_by else self._stage
        return (
            f"the loop has computed a value {what}, {cut}: a norm, an average or an"
            f" element of it is another on each rank, so what is logged of it is this rank's alone, and nothing may be"
            f" written by it. {self._instead(held)}"
        )

    def _instead(self, held: HeldWeight) -> str:
        if held.cut_by == ZERO and self._plan.data_parallel.shards_weights:
            return "Compute it of the model's parameters(), and write `.full_tensor()` behind it, on every rank."
        if held.cut_by == ZERO:
            return "Compute it of the model's parameters(), which are whole."
        return (
            "The whole gradient's norm is that of state.step(batch).gradient_norm; state.export writes whole weights."
        )

    @torch.no_grad()
    def remember(self) -> None:
        """From now on what has other values than now was written after something was read."""
        if self._is_across:
            with torch.DisableTorchFunctionSubclass():
                self._values = {key: digests_of(_local(each.tensor)) for key, each in self._held.items()}
            self._attributes = [_plain_attributes(module, names) for _, module, names in self._modules]

    def forget(self) -> None:
        """What is written from now on is Weft's."""
        self._values = self._attributes = None

    def check_values(self) -> None:
        """Refuse a weight that has other values than at `remember`, however they were written.

        Raises:
            RecipeError: there is one.
        """
        for key, then in (self._values or {}).items():
            held = self._held[key]
            if not all(map(torch.equal, then, digests_of(_local(held.tensor)))):
                self.refuse(held.name)

    def refuse(self, changed: str) -> None:
        """Refuse that the loop has written into `changed`, if it has read parts.

        Raises:
            RecipeError: it has.
        """
        if (cut := next((each for each in self._read.values() if each.cut_by), None)) is not None:
            what = f"what the optimizer holds of {cut.name}" if cut.of_optimizer else cut.name
            raise RecipeError(
                f"the loop has changed {changed} since the last step, and has read {what}, of which this rank has a"
                f" part ({self._setting(cut.cut_by)}): what is computed of that {DIFFERS}, {self._other(cut)}."
            )
        others = [each.name for each in self._read.values() if module_of(each.name) != module_of(changed)]
        if self._plan.mesh.pipeline > 1 and others:
            raise RecipeError(
                f"the loop has changed {changed} since the last step and has read {others[0]}, {self._stage}: what is"
                f" computed of several weights {DIFFERS}, read the weights of that module alone, or use mesh.pipeline"
                " = 1."
            )

    def _other(self, cut: HeldWeight) -> str:
        if cut.cut_by == ZERO and self._plan.data_parallel.shards_weights:
            return "compute it of the model's parameters() with `.full_tensor()`, or use data_parallel.zero = 0"
        if cut.cut_by == ZERO:
            return "compute it of the model's parameters(), which are whole, or use data_parallel.zero = 0"
        return f"read no weights, or use {cut.cut_by} = 1"

    def attributes_set(self) -> dict[str, str]:
        """What the loop has set of the modules' plain attributes since `remember`, which must be equal on all ranks.

        Raises:
            RecipeError: one of a module that only some stages have, beside values that were read of others.
        """
        if self._attributes is None:
            return {}
        facts = dict[str, str]()
        for (name, module, names), then in zip(self._modules, self._attributes, strict=True):
            now = _plain_attributes(module, names)
            if now == then:
                continue
            for key in [key for key, value in now.items() if then.get(key) != value]:
                if name and self._plan.mesh.pipeline > 1:
                    self.refuse(f"{name}.{key}")
                facts[SET_BY_LOOP + f"{name}.{key}".lstrip(".")] = _text_of(vars(module)[key], digest_of) or ""
        return facts

    @property
    def _stage(self) -> str:
        return f"and other ranks have the other stages of the model (mesh.pipeline = {self._plan.mesh.pipeline})"

    def _setting(self, cut_by: str) -> str:
        if cut_by == ZERO:
            return f"{ZERO} = {self._plan.data_parallel.zero}"
        return f"{cut_by} = {getattr(self._plan.mesh, cut_by.rpartition('.')[2])}"


def module_of(name: str) -> str:
    """Name of the module that holds a parameter."""
    return name.rpartition(".")[0]


_OF_MODULES = frozenset(vars(nn.Module()))


def _plain_attributes(module: nn.Module, names: Container[str]) -> dict[str, str]:
    """Name → what tells a plain attribute's value from another: of numbers, texts, tensors and lists of these."""
    return {
        name: text
        for name, value in vars(module).items()
        if name in names and name not in _OF_MODULES and (text := _text_of(value, _state_of)) is not None
    }


def _state_of(tensor: Tensor) -> str:
    return f"{tensor.data_ptr()} {tensor._version}"


def _text_of(value: Any, of_tensor: Callable[[Tensor], str], depth: int = 2) -> str | None:
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if isinstance(value, list | tuple | dict) and depth:
        held = cast("list[Any]", [*value.values()] if isinstance(value, dict) else value)
        return str([_text_of(each, of_tensor, depth - 1) for each in held[:_FEW]])
    return None


_FEW = 64
"""Values of a list in an attribute that are looked at."""


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def digests_of(tensor: Tensor) -> list[Tensor]:
    """Sums of the bits of a tensor's values along both dimensions of a square of them; and the values that are left."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.contiguous().view(_BITS[real.element_size()]).view(-1)
    width = isqrt(bits.numel())
    square = bits[: width * width].view(width, width)
    return [square.sum(0, dtype=torch.int64), square.sum(1, dtype=torch.int64), bits[width * width :].clone()]


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → whole numbers as wide."""
