"""Objects of the user's that are saved with a run: schedulers, counters, averages, whatever has a `state_dict`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
import xxhash
from torch import Tensor

from weft.checkpoint import Json
from weft.document import JsonObject
from weft.errors import CheckpointError, RecipeError
from weft.parallel import NestedSplit, Piece

_PREFIX = "attached"


@runtime_checkable
class Stateful(Protocol):
    """What can say its state and take it back, as torch's schedulers do."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Attached:
    """Objects by name.  Their states must be equal on all ranks: one rank's is kept."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._incoming: dict[str, Tensor] = {}

    def add(self, objects: Mapping[str, Any], saved_anyway: Sequence[object] = ()) -> None:
        """Attach further objects.  Raises `RecipeError` for what has no state to say, a name that is taken, and what a
        run saves by itself."""
        if not objects:
            raise RecipeError("state.attach() was given nothing. Name what to save: state.attach(scheduler=scheduler).")
        for name, found in objects.items():
            if isinstance(found, type):
                raise RecipeError(f"{name} is the class {found.__name__}. Attach an object that was made of it.")
            if any(found is each for each in saved_anyway):
                raise RecipeError(
                    f"{name} is what session.prepare was given, which state.save() saves anyway. Leave it out."
                )
            if not isinstance(found, Stateful):
                raise RecipeError(
                    f"{name} is a {type(found).__name__}, which has no state_dict() and load_state_dict(), so nothing"
                    " of it could be saved. Give it these two methods."
                )
            if name in self._objects and self._objects[name] is not found:
                raise RecipeError(f"another object is attached as {name}. Give this one another name.")
            self._objects[name] = found

    def states(self) -> tuple[dict[str, Json], dict[str, Tensor]]:
        """Return the states as JSON, and the tensors that these name.

        Raises:
            CheckpointError: a state holds what neither is (a function, an open file), with its place.
        """
        tensors: dict[str, Tensor] = {}
        found = {
            name: _written(each.state_dict(), f"{_PREFIX}/{name}", tensors) for name, each in self._objects.items()
        }
        return found, tensors

    def facts(self) -> dict[str, str]:
        """What must be equal on all ranks: a digest of every object's state."""
        states, tensors = self.states()
        found: dict[str, str] = {}
        for name, state in states.items():
            digest = xxhash.xxh3_64(repr(state).encode())
            for key, value in tensors.items():
                if key.startswith(f"{_PREFIX}/{name}/"):
                    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            found[f"the state of what is attached as {name}"] = digest.hexdigest()
        return found

    def pieces(self, *, counts: bool) -> Iterator[Piece]:
        """Tensors of the states, to be written by the rank that `counts`."""
        yield from _pieces(self.states()[1], counts=counts)

    def pieces_to_fill(self) -> Iterator[Piece]:
        """Tensors that a load fills; `load` gives them to the objects."""
        self._incoming = {name: value.detach().cpu().clone() for name, value in self.states()[1].items()}
        yield from _pieces(self._incoming, counts=False)

    def check(self, state: JsonObject) -> None:
        """Refuse a save with other objects.  Raises `CheckpointError`."""
        saved: Any = state.values.get("attached", {})
        if not isinstance(saved, dict):
            raise state.fail("attached", "an object with a state for each name")
        names = set(cast(dict[str, Any], saved))
        if missing := sorted(names - self._objects.keys()):
            raise CheckpointError(
                f"{state.path} was saved with {', '.join(missing)} attached, and this run has no such object, which"
                f" would begin anew. Write state.attach({missing[0]}=…) before state.load()."
            )
        if new := sorted(self._objects.keys() - names):
            raise CheckpointError(
                f"{state.path} holds no state for {', '.join(new)}, which was not attached when it was saved. Attach it"
                " after state.load(), with the state that it shall have."
            )

        try:
            _read(list(cast(dict[str, Any], saved).values()), self._incoming)
        except (ValueError, TypeError, KeyError):
            raise state.fail("attached", "what save() writes of attached objects") from None

    def load(self, state: Mapping[str, Json]) -> None:
        """Give every object what was saved of it."""
        saved = cast(Mapping[str, Json], state.get("attached") or {})
        for name, each in self._objects.items():
            each.load_state_dict(_read(saved[name], self._incoming))
        self._incoming = {}


def _pieces(tensors: Mapping[str, Tensor], *, counts: bool) -> Iterator[Piece]:
    for name, value in tensors.items():
        yield Piece(
            name=name,
            shape=value.shape,
            tensor=value.detach().contiguous().view(-1),
            split=NestedSplit(),
            start=0,
            counts=counts,
        )


def _written(value: Any, where: str, tensors: dict[str, Tensor]) -> Json:
    """A value as JSON; what JSON has no form for is an object of one key that says what it is."""
    if isinstance(value, Tensor):
        tensors[where] = value
        return {"tensor": where}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value).items()
        written: list[Json] = [
            [_written(key, where, tensors), _written(inner, f"{where}/{key}", tensors)] for key, inner in entries
        ]
        return {"counter" if isinstance(value, Counter) else "entries": written}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_written(inner, f"{where}/{at}", tensors) for at, inner in enumerate(cast(Sequence[Any], value))]
        whole = items
        return whole if isinstance(value, list) else {"tuple" if isinstance(value, tuple) else "set": whole}
    item: Callable[[], Any] | None = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:  # a number of numpy
        return _written(item(), where, tensors)
    raise CheckpointError(
        f"{where.replace('/', '.').removeprefix(_PREFIX + '.')} is a {type(value).__name__}, which a checkpoint cannot"
        " hold: numbers, text, tensors, lists and dictionaries can be saved. Leave it out of state_dict()."
    )


def _read(written: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(written, list):
        return [_read(inner, tensors) for inner in cast(list[Any], written)]
    if not isinstance(written, dict):
        return written
    ((kind, inside),) = cast(dict[str, Any], written).items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "float":
        return float(inside)
    if kind not in ("entries", "counter", "tuple", "set"):
        raise ValueError(kind)
    items = [_read(inner, tensors) for inner in inside]
    if kind in ("entries", "counter"):
        entries = {_hashable(key): value for key, value in items}
        return Counter(entries) if kind == "counter" else entries
    return tuple(items) if kind == "tuple" else set(items)


def _hashable(key: Any) -> Any:
    return tuple(cast(list[Any], key)) if isinstance(key, list) else key
