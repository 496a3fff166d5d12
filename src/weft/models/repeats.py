"""Keys and values that a model repeats so that each head of queries has its own: what they were before.

Grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245) has fewer heads of keys than of queries.
Who writes it out repeats them first.  Kernels do without, and ranks that share a sequence need not send copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

_SOURCE, _EXPANDED = "_weft_repeated", "_weft_expanded"
REPEATS = ("expand", "reshape", "repeat_interleave")
"""Functions that repeat heads: the last, or the first two one after the other."""


def note_repeat(made: Tensor, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let a tensor that one of `REPEATS` has made know whose heads it repeats, each several times in a row."""
    source = args[0] if args else None
    if not isinstance(source, Tensor):
        return
    if name == "expand":
        if source.dim() == 5 and source.shape[2] == 1 and made.shape[:2] == source.shape[:2]:
            setattr(made, _EXPANDED, source)
    elif name == "repeat_interleave":
        repeats, dim = (*args[1:], *(kwargs[each] for each in ("repeats", "dim") if each in kwargs), None, None)[:2]
        if isinstance(repeats, int) and dim in (1, -3) and source.dim() == 4:
            _note(made, source)
    elif isinstance(before := getattr(source, _EXPANDED, None), Tensor):
        heads = source.shape[1] * source.shape[2]
        if made.shape == (source.shape[0], heads, *source.shape[3:]):
            _note(made, before.squeeze(2))


def _note(made: Tensor, source: Tensor) -> None:
    if not made.is_inference():  # of which nobody knows whether they have changed
        setattr(_root(made), _SOURCE, (source, source._version, made._version, _place(made)))


def unrepeated(tensor: Tensor) -> Tensor:
    """Return (samples, kv heads, …) of which this is (samples, heads, …), each repeated; else the tensor itself."""
    known = None if tensor.is_inference() else getattr(_root(tensor), _SOURCE, None)
    if known is None:
        return tensor
    source, before, after, place = known
    is_as_made = (source._version, tensor._version, _place(tensor)) == (before, after, place)
    return source if is_as_made else tensor


def _root(tensor: Tensor) -> Tensor:
    """The tensor that this is a view of: a transpose's transpose is another view of the same."""
    base = tensor._base  # pyright: ignore[reportPrivateUsage]
    return tensor if base is None else base


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()
