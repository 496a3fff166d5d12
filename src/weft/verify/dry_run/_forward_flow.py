"""Modes that follow a forward on the meta device: what was computed from which calls, and where attention is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.model.attention.call import ATTENTION, attend, attend_multi_head, multi_head_call
from weft.model.families import Cut, FoundCut
from weft.techniques.send_trace import ModuleCall
from weft.verify.dry_run._collective_recorder import ANSWERS

_OF_A_SHAPE = ("new_", "empty_like", "zeros_like", "ones_like")
"""Operators that read the shape of a tensor and no value: what begins so, as a mask of dropout, depends on nothing."""


class CallFlow(TorchDispatchMode):
    """Follows the results of calls through a forward; what only real numbers could answer is answered as in a dry run.

    Told apart by storages: what autograd keeps is another tensor with the same one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, frozenset[int]] = {}
        """Calls whose results a storage was computed from."""
        self._alive: list[Tensor] = []
        """Tensors kept so that no two storages have one address."""

    def begin(self, place: int, result: Tensor) -> None:
        """Mark `result` as the result of a call, and of those calls that it already depends on."""
        self._alive.append(result)
        self._places[_storage(result)] = self.places(result) | {place}

    def places(self, tensor: Tensor) -> frozenset[int]:
        return self._places.get(_storage(tensor), frozenset())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_meta and func in ANSWERS:
            return ANSWERS[func](args[0])
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta and args[1].dim() == 3:
            made = args[0].new_empty(args[0].shape[0], args[1].shape[2])  # the kernel would ask for bf16
        else:
            made = func(*args, **(kwargs or {}))
        # A result depends on every call that one of its operands depends on.  Operators that read a shape pass nothing
        # on.
        if self._places and not func.overloadpacket.__name__.startswith(_OF_A_SHAPE):
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            places = frozenset().union(*(self.places(tensor) for tensor in read))
            for tensor in tree_leaves(made) if places else ():
                if isinstance(tensor, Tensor):
                    self._alive.append(tensor)
                    self._places[_storage(tensor)] = self.places(tensor) | places
        return made


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def has_parts(calls: Iterable[ModuleCall | None]) -> bool:
    """Return whether tensor ranks have parts of what was computed from such calls, in their order: of heads, which a
    proposed table may leave whole."""
    # The last call along the way decides: a row-parallel layer sums parts up, a column-parallel one divides again.
    last = [call for call in calls if call is not None and call.kind in ("column", "row", "vocab")][-1:]
    return any(call.kind == "column" and not call.gathers_output for call in last)


class AttentionObserver(TorchFunctionMode):
    """Tells of every call of an attention function: queries, keys, values, what it returned, and its window."""

    def __init__(self, note: Callable[[Tensor, Tensor, Tensor, Tensor, int | None], None]) -> None:
        super().__init__()
        self._tell = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward and (call := multi_head_call(args, kwargs or {})) is not None:
            return attend_multi_head(call, self._attend)
        made = func(*args, **(kwargs or {}))
        if func in ATTENTION:
            operands = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            window = args[3].window if func is attend else None
            self._tell(operands["query"], operands["key"], operands["value"], made, window)
        return made

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        made = F.scaled_dot_product_attention(query, key, value, **settings)
        self._tell(query, key, value, made, None)
        return made


def first_tensor(values: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """Return the first tensor: a module's activation."""
    return next(value for value in (*values, *named.values()) if isinstance(value, Tensor))


def crossing_elements(cut: Cut | None, index: int) -> tuple[int, int] | None:
    """Return the elements that cross before a block: those that grow with the samples, and the others.

    None: the cut was not found by a look, or the block is the first.
    """
    # A table's cut hands on one activation, whose shape is the block's own input.
    if not isinstance(cut, FoundCut) or index == 0:
        return None
    grows, stays = 0, 0
    for crossing in cut.crossings[index - 1]:
        elements = math.prod(crossing.shape)
        grows, stays = (grows + elements, stays) if crossing.is_per_sample else (grows, stays + elements)
    return grows, stays
