"""Values of a user's objects as JSON and tensors, and back: what checkpoints hold of schedulers and optimizers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from weft.config.document import Json, JsonObject
from weft.errors import CheckpointError
from weft.run.checkpoint import StoredCheckpoint
from weft.techniques.core import CheckpointShard, NestedSplit


class NoFormError(Exception):
    """A value that has no form in JSON: its place, and the value."""

    def __init__(self, place: str, value: object) -> None:
        super().__init__(place)
        self.place, self.value = place, value


def write_form(value: Any, where: str, tensors: dict[str, Tensor]) -> Json:
    """Return a value as JSON; what JSON has no form for is an object of one key that says what it is.  Tensors are put
    into `tensors` by their place.

    Raises:
        NoFormError: it holds what neither is (a function, an open file).
    """
    if isinstance(value, Tensor):
        tensors[where] = value
        return {"tensor" if value.device.type == "cpu" else "device tensor": where}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value).items()
        written: list[Json] = [
            [write_form(key, where, tensors), write_form(inner, f"{where}/{key}", tensors)] for key, inner in entries
        ]
        return {"counter" if isinstance(value, Counter) else "entries": written}
    if isinstance(value, list | tuple | set | frozenset):
        items = [write_form(inner, f"{where}/{at}", tensors) for at, inner in enumerate(cast(Sequence[Any], value))]
        whole = items
        return whole if isinstance(value, list) else {"tuple" if isinstance(value, tuple) else "set": whole}
    item: Callable[[], Any] | None = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:  # a number of numpy
        return write_form(item(), where, tensors)
    raise NoFormError(where, value)


def read_form(form: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """Return the value whose form `write_form` returned.  With `device`, tensors that were on one go there.

    Raises:
        ValueError, TypeError, KeyError: it is no such form, or names a tensor that is not there.
    """
    if isinstance(form, list):
        return [read_form(inner, tensors, device) for inner in cast(list[Any], form)]
    if not isinstance(form, dict):
        return form
    ((kind, inside),) = cast(dict[str, Any], form).items()
    if kind in ("tensor", "device tensor"):
        return tensors[inside] if device is None or kind == "tensor" else tensors[inside].to(device)
    if kind == "float":
        return float(inside)
    if kind not in ("entries", "counter", "tuple", "set"):
        raise ValueError(kind)
    items = [read_form(inner, tensors, device) for inner in inside]
    if kind in ("entries", "counter"):
        entries = {_hashable(key): value for key, value in items}
        return Counter(entries) if kind == "counter" else entries
    return tuple(items) if kind == "tuple" else set(items)


def tensors_named(form: Any) -> Iterator[str]:
    """Yield the places of all tensors that a form names."""
    if isinstance(form, list):
        for inner in cast(list[Any], form):
            yield from tensors_named(inner)
    elif isinstance(form, dict):
        for kind, inside in cast(dict[str, Any], form).items():
            if kind not in ("tensor", "device tensor"):
                yield from tensors_named(inside)
            elif isinstance(inside, str):
                yield inside


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value and in the lists, tuples and dictionaries that it holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(cast(Mapping[Any, Any], value).values()))
    elif isinstance(value, list | tuple):
        for inner in cast(Sequence[Any], value):
            yield from tensors_in(inner)


def check_form(place: JsonObject, name: str, form: Any, expected: str) -> None:
    """Refuse what `write_form` cannot have returned, whatever the tensors that it names."""
    try:
        read_form(form, dict.fromkeys(tensors_named(form), torch.empty(0)))
    except (ValueError, TypeError, KeyError):
        raise place.fail(name, expected) from None


def rooms_for(stored: StoredCheckpoint, names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors that a checkpoint is to fill, by the names that its forms say.

    Raises:
        CheckpointError: it lacks one.
    """
    named = sorted(set(names))
    if lost := next((name for name in named if name not in stored.runs), None):
        raise CheckpointError(f"{stored.folder} lacks {lost}, which its manifest names. Load an earlier one.")
    return {name: torch.zeros(stored.shape(name), dtype=stored.dtype(name)) for name in named}


def digest_of_form(form: Json, tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of a form and of the tensors that it names."""
    digest = xxhash.xxh3_64(repr(form).encode())
    for name in tensors_named(form):
        digest.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def form_shards(tensors: Mapping[str, Tensor], *, counts: bool) -> Iterator[CheckpointShard]:
    """Yield whole tensors as shards, by their places."""
    for name, value in tensors.items():
        yield CheckpointShard(
            name=name,
            shape=value.shape,
            tensor=value.detach().contiguous().view(-1),
            split=NestedSplit(),
            start=0,
            counts=counts,
        )


def _hashable(key: Any) -> Any:
    return tuple(cast(list[Any], key)) if isinstance(key, list) else key
