"""Keys and values that a model repeats so that each head of queries has its own: what they were before.

Grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245) has fewer heads of keys than of queries.
Who writes it out repeats them first.  Kernels do without, and ranks that share a sequence need not send copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_NOTE, _EXPANDED = "_weft_repeated", "_weft_expanded"
REPEATS = ("expand", "reshape", "repeat_interleave")
"""Functions that repeat heads: the last, or the first two one after the other."""
TURNS = ("transpose", "swapaxes", "swapdims", "permute", "mT")
"""Functions and properties that lay repeated keys out for a product."""


@dataclass(frozen=True, slots=True)
class _Note:
    """That a tensor repeats the heads of another one, as long as nothing has happened to either.

    The note lies on the very tensor that was made: whatever else stands between it and the product (another function,
    which may do something in its backward) makes a tensor without one.
    """

    source: Tensor
    """(samples, kv heads, …)."""
    between: tuple[Tensor, ...]
    """Tensors on the way from the source; not the one that the note lies on, which would keep itself alive."""
    versions: tuple[int, ...]
    """Versions of the source, of these, and of the one that the note lies on."""
    turned: bool = False
    """Whether the last two dims have changed places since."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether the source can stand in for the tensor of this note: with the same values, and the same gradient."""
        way = (*self.between, tensor)
        hooked = any(each._backward_hooks for each in way)  # which see the gradients of every copy of a head
        return not hooked and self.versions == tuple(each._version for each in (self.source, *way))


def note_repeat(made: Tensor, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let a tensor that one of `REPEATS` or `TURNS` has made know whose heads it repeats, one after the other."""
    given = args[0] if args else None
    if not isinstance(given, Tensor):
        return
    if name in TURNS:
        _note_turn(made, given)
    elif name == "expand":
        if given.dim() == 5 and given.shape[2] == 1 and _without(made, 2) == _without(given, 2):
            setattr(made, _EXPANDED, given)
    elif name == "repeat_interleave":
        repeats, dim = (*args[1:], *(kwargs[each] for each in ("repeats", "dim") if each in kwargs), None, None)[:2]
        if isinstance(repeats, int) and dim in (1, -3) and given.dim() == 4:
            _set(made, given)
    elif (before := getattr(given, _EXPANDED, None)) is not None and _is_expanded(given, before, made):
        _set(made, before.squeeze(2), given)


def unrepeated(tensor: Tensor, *, turned: bool = False) -> Tensor | None:
    """Return (samples, kv heads, …) of which this is (samples, heads, …), each repeated, and with the last two dims in
    each other's place where it was `turned`; None: nothing says that it is."""
    note: _Note | None = getattr(tensor, _NOTE, None)
    return note.source if note is not None and note.turned == turned and note.holds(tensor) else None


def _note_turn(made: Tensor, given: Tensor) -> None:
    note: _Note | None = getattr(given, _NOTE, None)
    if note is None or note.turned or not note.holds(given):
        return
    turned = given.transpose(-1, -2)
    if (made.shape, made.stride()) == (turned.shape, turned.stride()):
        _set(made, note.source, *note.between, given, turned=True)


def _set(made: Tensor, source: Tensor, *between: Tensor, turned: bool = False) -> None:
    """Lay a note on a tensor, unless somewhere on the way to it nobody counts changes, or gradients are stopped: a view
    that is made without them still says that it requires them."""
    way = (*between, made)
    counted = not any(each.is_inference() for each in (source, *way))
    if counted and all((each.grad_fn is not None) == source.requires_grad for each in way):
        setattr(made, _NOTE, _Note(source, between, tuple(each._version for each in (source, *way)), turned))


def _is_expanded(given: Tensor, before: Tensor, made: Tensor) -> bool:
    """Whether it still is as it was made, and then heads and their copies were taken together."""
    is_as_made = given.dim() == 5 and given.stride(2) == 0 and _without(given, 2) == _without(before, 2)
    return is_as_made and made.shape == (given.shape[0], given.shape[1] * given.shape[2], *given.shape[3:])


def _without(tensor: Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
