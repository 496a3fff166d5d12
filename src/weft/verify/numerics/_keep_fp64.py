"""Keeps a computation in fp64 that a model would take to fp32, bf16 or fp16 in between.

Two plans that compute the same differ by rounding, and the check tells a fault from rounding by doing everything in
fp64.  Models cast inside, though: norms and softmax to fp32 "for accuracy", whatever their input has.  There a last bit
that differs between two plans in fp64 becomes one in fp32, a million times as large, and hides whether they agree.  So
under this mode a cast of an fp64 tensor to a narrower type is none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from weft.config.recipe import Precision

_WIDE = torch.float64
_NARROW: Mapping[torch.dtype, Precision] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_CASTS = frozenset({"_to_copy", "sum", "mean", "prod", "cumsum", "cumprod", "linalg_vector_norm", "norm"})
"""Operators that are told what type to compute in."""


class KeepFp64(TorchDispatchMode):
    """Within it, what is fp64 stays fp64: enter it around forwards, losses and backwards of a model in fp64.

    Values that were narrow from the start (tables computed at construction, positions made floating) stay as they are:
    they are the same under every plan.  Where such a value meets a wide one in an operator that takes one type only, it
    is widened.  What could not be kept, because an operator has no fp64 or writes into narrow memory, is in `narrowed`.

    With `watches_only` nothing is changed, and every cast is in `narrowed`: for models that need their own casts.
    """

    def __init__(self, *, watches_only: bool = False) -> None:
        super().__init__()
        self.narrowed: dict[str, Precision] = {}
        """Name of an operator that took fp64 and gave less → type that it gave."""
        self._watches_only = watches_only

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        tensors = [*_tensors(args), *_tensors(options.values())]
        # What has no fp64 operand was narrow from the start: the same under every plan, and left as it is.
        if not any(tensor.dtype == _WIDE for tensor in tensors):
            return _without_wide(func, args, options)
        name = func.overloadpacket.__name__
        if options.get("dtype") in _NARROW and name in _CASTS:
            # In a backward a cast leads into the gradient of a narrow tensor, which autograd wants in that tensor's
            # type.
            if self._watches_only or _in_backward():
                self.narrowed[name] = _NARROW[options["dtype"]]
            else:
                options = {**options, "dtype": _WIDE}
        if name == "_grouped_mm" and not self._watches_only:
            return _grouped_product(*_cast(args, _NARROW, _WIDE), **_cast(options, _NARROW, _WIDE))
        result = func(*args, **options) if self._watches_only else self._computed(func, name, tensors, args, options)
        if _writes(func) and isinstance(args[0], Tensor) and args[0].dtype in _NARROW:
            self.narrowed[name] = _NARROW[args[0].dtype]
        return result

    def _computed(self, func: Any, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        mixed = any(tensor.dtype in _NARROW for tensor in tensors)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as problem:
            if mixed and not _writes(func):
                return func(*_cast(args, _NARROW, _WIDE), **_cast(kwargs, _NARROW, _WIDE))
            if mixed:
                # Into narrow memory goes what the model would have put there.
                self.narrowed[name] = _NARROW[args[0].dtype]
                return func(args[0], *_cast(args[1:], {_WIDE}, args[0].dtype), **_cast(kwargs, {_WIDE}, args[0].dtype))
            if "not implemented for 'Double'" not in str(problem) or _writes(func):
                raise
        self.narrowed[name] = "fp32"
        result = func(*_cast(args, {_WIDE}, torch.float32), **_cast(kwargs, {_WIDE}, torch.float32))
        return _cast(result, {torch.float32}, _WIDE)


def _without_wide(func: Any, args: Any, kwargs: Any) -> Any:
    """The result, in fp64 where it is a number of fp64, such as its least, for which the type that is wanted has no
    place: models ask for the least number of their scores' type, and make a tensor of the default type."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as problem:
        if "without overflow" not in str(problem) or kwargs.get("dtype", torch.float32) not in (None, *_NARROW):
            raise
        return func(*args, **{**kwargs, "dtype": _WIDE})


def _in_backward() -> bool:
    """Whether autograd casts: the gradient of what is narrow must be so, too.  A forward that a checkpoint computes
    again inside of a backward records gradients, and is not meant."""
    task: int = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
    return task != -1 and not torch.is_grad_enabled()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's operands, each of which is a tensor, a list of such, or none.  (A general walk of
    trees took a fifth of a check's time: AMD EPYC, 2026-11-26.)"""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@cache
def _writes(func: Any) -> bool:
    """Whether an operator changes its first operand."""
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def _cast(tree: Any, types: Collection[torch.dtype], target: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(target) if tensor.dtype in types else tensor, tree)


def _grouped_product(
    x: Tensor, weights: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """`torch._grouped_mm`, which takes no fp64: of 2-D by 3-D (rows in groups), 3-D by 3-D, and 2-D by 2-D (sums in
    groups), the products one after another."""
    del out_dtype
    if offs is None:
        product = torch.bmm(x, weights)
    else:
        stops = [int(stop) for stop in offs]
        groups = list(zip([0, *stops[:-1]], stops, strict=True))
        if x.ndim == 2 and weights.ndim == 3:
            product = torch.cat([x[a:b] @ weight for (a, b), weight in zip(groups, weights, strict=True)])
            product = torch.cat([product, product.new_zeros(len(x) - len(product), product.shape[1])])
        elif x.ndim == 3 and weights.ndim == 2:
            product = torch.cat([one @ weights[:, a:b] for (a, b), one in zip(groups, x, strict=True)], dim=1)
        else:
            product = torch.stack([x[:, a:b] @ weights[a:b] for a, b in groups])
    return product if bias is None else product + bias
