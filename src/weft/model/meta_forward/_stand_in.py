"""Runs operators without memory: what is large lives on the meta device, what decides shapes is computed for real.

Integers and booleans that come from indices (tokens, positions, masks, routing) are small and carried as real values on
the CPU, so that a mixture's `nonzero`, `bincount` and loops over experts see true counts.  Where such values would come
from floating-point activations, which have none here, a stand-in is drawn: `topk`, `argmax` and `sort` give random
distinct choices, so that routing is balanced but for chance.  What cannot be stood in for is assumed, and said.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from weft.errors import RecipeError
from weft.model.meta_forward._names import glob_of

_CARRIED_ELEMENTS = 1 << 22
"""Larger integer tensors are not carried: a causal mask of 32,768 positions is a gigabyte."""
_META = torch.device("meta")
_FLOATS_ALONE = (torch.ops.aten.histc,)
"""Operators that CPUs compute of floating-point numbers alone, and models ask of small whole ones."""


class StandIns:
    """Answers what the meta device cannot; `notes`: what was assumed."""

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        self._generator = torch.Generator().manual_seed(0)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> Any:
        """Run one ATen operator; `where` names the module for notes and messages."""
        where = glob_of(where)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            return self._on_values(func, args, kwargs, tensors)
        special = self._specials().get(func.overloadpacket._qualified_op_name.removeprefix("aten::"))
        if special is not None and tensors[0].is_meta:
            return special(func, args, kwargs, where)
        return self._on_shapes(func, args, kwargs, where)

    def _on_values(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[Tensor]) -> Any:
        """All operands are real (or there is none): compute, unless the result is large or a floating constant on
        meta."""
        # Integers (positions, masks, sizes) are computed, for forwards branch and index by them; large results and
        # floats are not.
        wants_meta = _is_meta(kwargs.get("device"))
        has_device = any(argument.name == "device" for argument in func._schema.arguments)
        moved = {name: value for name, value in kwargs.items() if name != "device"} if has_device else kwargs
        # A write, or a view, must reach the operand itself.
        if func._schema.is_mutable or any(returned.alias_info for returned in func._schema.returns):
            return func(*args, **moved)
        shapes = self._probe(func, args, {**moved, "device": _META} if has_device else moved)
        if shapes is None:
            return func(*args, **moved)
        floats = any(leaf.is_floating_point() for leaf in _tensors(shapes))
        if sum(leaf.numel() for leaf in _tensors(shapes)) > _CARRIED_ELEMENTS or (floats and wants_meta):
            return shapes
        if has_device and not tensors:
            moved = {**moved, "device": torch.device("cpu")}
        whole = [tensor.dtype for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
        if whole and func.overloadpacket in _FLOATS_ALONE:
            return func(*_as_floats(args), **moved).to(whole[0])
        return func(*args, **moved)

    def _probe(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result on meta; None where shapes depend on values."""
        try:
            return func(*_to_meta(args), **_to_meta(dict(kwargs)))
        except (NotImplementedError, RuntimeError):
            return None

    def _on_shapes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> Any:
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        if name in ("index", "index_put", "index_put_", "_unsafe_index"):
            args = (args[0], self._numbered(args[1], where), *args[2:])
        try:
            result = func(*_to_meta(args), **_to_meta(dict(kwargs)))
        except NotImplementedError as problem:
            raise RecipeError(
                f"the model cannot be described without running it: {name} in {where or 'its forward'} has no answer on"
                f" the meta device ({str(problem).splitlines()[0]}). Give the sizes it computes as settings of the"
                " module, or keep what depends on values out of the forward."
            ) from problem
        in_place = func._schema.is_mutable and args and isinstance(args[0], Tensor) and not args[0].is_meta
        return args[0] if in_place else result

    def _numbered(self, indices: Any, where: str) -> list[Any]:
        """Boolean masks as positions, of which there are as many as the mask has ones."""
        numbered: list[Any] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                count = self._assumed(index, where) if index.is_meta else int(index.count_nonzero())
                numbered += [torch.empty(count, dtype=torch.int64, device=_META)] * index.dim()
            else:
                numbered.append(index)
        return numbered

    def _assumed(self, mask: Tensor, where: str) -> int:
        count = (mask.numel() + 1) // 2
        self._note(
            f"{where or 'its forward'} selects by values of activations: half of the positions are assumed ({count} of"
            f" {mask.numel()})"
        )
        return count

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def _specials(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "_local_scalar_dense": self._read_back,
            "equal": self._read_back,
            "allclose": self._read_back,
            "nonzero": self._nonzero,
            "masked_select": self._masked_select,
            "topk": self._topk,
            "argmax": self._choice,
            "argmin": self._choice,
            "sort": self._sort,
            "argsort": self._sort,
            "multinomial": self._multinomial,
            "_assert_async": lambda *given: None,
            "_grouped_mm": self._grouped,
        }

    def _grouped(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> Tensor:
        """Rows times a matrix each; kernels would ask for bf16, and for widths of 16 bytes."""
        rows, matrices = args[0], args[1]
        assert (rows.dim(), matrices.dim()) == (2, 3), "rows of groups stand one behind the other"
        return rows.new_empty(rows.shape[0], matrices.shape[2])

    def _read_back(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> Any:
        dtype = args[0].dtype
        # 1 and False let most loops and branches end.
        value: Any = False if dtype is torch.bool or func.overloadpacket.__name__ != "_local_scalar_dense" else 1
        self._note(f"{where or 'its forward'} reads a value of an activation back: {value} is assumed")
        return float(value) if dtype.is_floating_point else value

    def _nonzero(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> Tensor:
        return torch.empty(self._assumed(args[0], where), args[0].dim(), dtype=torch.int64, device=_META)

    def _masked_select(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str) -> Tensor:
        mask = args[1]
        count = self._assumed(mask, where) if mask.is_meta else int(mask.expand(args[0].shape).count_nonzero())
        return torch.empty(count, dtype=args[0].dtype, device=_META)

    def _random(self, like: Tensor) -> Tensor | None:
        """Real random scores in place of a meta tensor; None when it is too large to be carried."""
        # Routers choose experts by values; random scores choose evenly, as a balanced router would.
        if like.numel() > _CARRIED_ELEMENTS:
            return None
        return torch.rand(like.shape, generator=self._generator)

    def _drawn(self, result: Any, drawn: Callable[[Tensor], Tensor], like: Tensor, where: str) -> Any:
        scores = self._random(like)
        if scores is None:
            return result
        self._note(f"{where or 'its forward'} chooses by values of activations: choices at random, balanced, stand in")
        indices = drawn(scores)
        return indices if isinstance(result, Tensor) else (result[0], indices)

    def _topk(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> Any:
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        return self._drawn(func(*args, **kwargs), lambda scores: scores.topk(args[1], dim)[1], args[0], where)

    def _choice(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> Any:
        settings = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | dict(kwargs)
        return self._drawn(func(*args, **kwargs), lambda scores: scores.argmax(**settings), args[0], where)

    def _sort(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> Any:
        result = func(*args, **kwargs)
        dim = kwargs.get("dim", next((arg for arg in args[1:] if isinstance(arg, int) and arg is not True), -1))
        return self._drawn(result, lambda scores: scores.argsort(dim), args[0], where)

    def _multinomial(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> Any:
        count, replacement = args[1], bool(args[2]) if len(args) > 2 else False
        result = torch.empty(*args[0].shape[:-1], count, dtype=torch.int64, device=_META)
        return self._drawn(
            result,
            lambda scores: torch.multinomial(scores + 1e-3, count, replacement, generator=self._generator),
            args[0],
            where,
        )


class StandInMode(TorchDispatchMode):
    """A mode in which operators run without memory, as `StandIns` answers them. `where` names the
    module for messages."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._answers, self._where = StandIns(), where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._answers.run(func, args, kwargs or {}, self._where)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _as_floats(tree: Any) -> Any:
    def convert(leaf: Any) -> Any:
        return leaf.to(torch.float64) if isinstance(leaf, Tensor) and not leaf.is_floating_point() else leaf

    return tree_map(convert, tree)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _to_meta(tree: Any) -> Any:
    """Tensors and devices of a tree of arguments on meta."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            return leaf.detach().to(_META)
        return _META if isinstance(leaf, torch.device) else leaf

    return tree_map(convert, tree)


def copy_on_meta(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy without memory, but for the integers that it holds in buffers; floats in `dtype`, if given."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, dtype=dtype if tensor.is_floating_point() else None, device="meta")

    stand_ins: dict[int, Any] = {}
    for parameter in module.parameters():
        stand_ins[id(parameter)] = nn.Parameter(empty(parameter), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        keeps = not buffer.is_floating_point() and not buffer.is_meta
        stand_ins[id(buffer)] = buffer.clone() if keeps else empty(buffer)
    for inner in module.modules():
        for value in vars(inner).values():
            if isinstance(value, Tensor) and not value.is_leaf:  # a pruned weight, which torch refuses to copy
                stand_ins.setdefault(id(value), empty(value))
    return copy.deepcopy(module, stand_ins)
