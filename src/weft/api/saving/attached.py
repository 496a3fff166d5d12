"""Objects of the user's that are saved with a run: schedulers, counters, averages, whatever has a `state_dict`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from weft.api.ranks.json_values import NoFormError, digest_of_form, form_pieces, read_form, write_form
from weft.config.document import Json, JsonObject
from weft.errors import CheckpointError, RecipeError
from weft.techniques.core import Piece

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
        try:
            return {
                name: write_form(each.state_dict(), f"{_PREFIX}/{name}", tensors)
                for name, each in self._objects.items()
            }, tensors
        except NoFormError as found:
            raise CheckpointError(
                f"{found.place.replace('/', '.').removeprefix(_PREFIX + '.')} is a {type(found.value).__name__}, which"
                " a checkpoint cannot hold: numbers, text, tensors, lists and dictionaries can be saved. Leave it out"
                " of state_dict()."
            ) from None

    def facts(self) -> dict[str, str]:
        """What must be equal on all ranks: a digest of every object's state."""
        states, tensors = self.states()
        return {
            f"the state of what is attached as {name}": digest_of_form(state, tensors) for name, state in states.items()
        }

    def pieces(self, *, counts: bool) -> Iterator[Piece]:
        """Tensors of the states, to be written by the rank that `counts`."""
        yield from form_pieces(self.states()[1], counts=counts)

    def pieces_to_fill(self) -> Iterator[Piece]:
        """Tensors that a load fills; `load` gives them to the objects."""
        self._incoming = {name: value.detach().cpu().clone() for name, value in self.states()[1].items()}
        yield from form_pieces(self._incoming, counts=False)

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
            read_form(list(cast(dict[str, Any], saved).values()), self._incoming)
        except (ValueError, TypeError, KeyError):
            raise state.fail("attached", "what save() writes of attached objects") from None

    def load(self, state: Mapping[str, Json]) -> None:
        """Give every object what was saved of it."""
        saved = cast(Mapping[str, Json], state.get("attached") or {})
        for name, each in self._objects.items():
            each.load_state_dict(read_form(saved[name], self._incoming))
        self._incoming = {}
