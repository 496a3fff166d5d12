"""Objects with a `state_dict`, by name: what one save takes of them, and one load gives back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from torch import Tensor

from weft.api.ranks.json_values import (
    NoFormError,
    check_form,
    digest_of_form,
    form_shards,
    read_form,
    rooms_for,
    tensors_named,
    write_form,
)
from weft.config.document import Json, JsonObject
from weft.errors import CheckpointError, RecipeError
from weft.run.checkpoint import StoredCheckpoint
from weft.techniques.core import CheckpointShard


@runtime_checkable
class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict`, as torch's schedulers have."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class StatefulKind(NamedTuple):
    """One kind of such objects: the member of a save's state that holds them, and how errors speak of them."""

    member: str
    label: str
    """How errors call the object `{name}`."""
    if_new: str
    """Advice for an object that the save has no state of."""
    if_missing: str
    """Advice for an object that is in the save and not here; empty: it is left out."""


ATTACHED = StatefulKind(
    "attached",
    "what is attached as {name}",
    "Attach it after state.load(), with the state that it shall have.",
    "Write state.attach({name}=…) before state.load().",
)
_LEAVE = "Leave it out, or load what was saved with it."
EXTRA = StatefulKind("extra", "extra[{name!r}]", _LEAVE, "Write session.load(…, extra={{{name!r}: …}}).")
SCHEDULERS = StatefulKind("schedulers", "scheduler {name}", _LEAVE, "")


class StatefulObjects:
    """Objects of one kind.  Their states must be equal on all ranks: one rank's is kept."""

    def __init__(
        self, kind: StatefulKind, objects: Mapping[Any, Any] | None = None, saved: Sequence[object] = ()
    ) -> None:
        """`objects`, `saved`: see `add`."""
        self._kind = kind
        self._objects: dict[str, Stateful] = {}
        self._forms: dict[str, Json] = {}
        self._tensors: dict[str, Tensor] = {}
        self.add(objects or {}, saved)

    def add(self, objects: Mapping[Any, Any], saved: Sequence[object] = ()) -> None:
        """Take further objects.

        Raises:
            RecipeError: one has no state to say or a name that is taken, or is among those that are `saved` anyway.
        """
        for name, thing in objects.items():
            if not isinstance(name, str) or not name or "/" in name:
                raise RecipeError(f"{self._kind.member} names an object {name!r}. Give it a text without slashes.")
            label = self._label(name)
            if isinstance(thing, type):
                raise RecipeError(f"{label} is the class {thing.__name__}. Give an object that was made of it.")
            if any(thing is item for item in saved):
                raise RecipeError(
                    f"{label} is what session.prepare was given, which a save saves anyway. Leave it out."
                )
            if not isinstance(thing, Stateful):
                raise RecipeError(
                    f"{label} is a {type(thing).__name__}, which has no state_dict() and load_state_dict(), so nothing"
                    " of it could be saved. Give it these two methods."
                )
            if self._objects.setdefault(name, thing) is not thing:
                raise RecipeError(f"another object is {label.removeprefix('what is ')}. Give this one another name.")

    @property
    def member(self) -> str:
        """Key of their states in a save."""
        return self._kind.member

    def _label(self, name: str) -> str:
        return self._kind.label.format(name=name)

    # ── saving ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def written(self) -> dict[str, Json]:
        """Return the states of now as JSON, by name; `facts` and `checkpoint_shards` are of the same.

        Raises:
            CheckpointError: one holds what is neither a plain value nor a tensor, with its place.
        """
        self._tensors, member = {}, self._kind.member
        try:
            self._forms = {
                name: write_form(item.state_dict(), f"{member}/{name}", self._tensors)
                for name, item in self._objects.items()
            }
        except NoFormError as found:
            raise CheckpointError(
                f"{found.place.replace('/', '.')} is a {type(found.value).__name__}, which a checkpoint cannot hold:"
                " numbers, text, tensors, lists and dictionaries can be saved. Leave it out of state_dict()."
            ) from None
        return self._forms

    def facts(self) -> dict[str, str]:
        """Return the facts that must be equal on all ranks: a digest of every object's state."""
        return {
            f"the state of {self._label(name)}": digest_of_form(form, self._tensors)
            for name, form in self._forms.items()
        }

    def checkpoint_shards(self, *, counts: bool) -> Iterator[CheckpointShard]:
        """Tensors of the states, to be written by the rank that `counts`."""
        yield from form_shards(self._tensors, counts=counts)

    # ── loading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, state: JsonObject) -> None:
        """Refuse a save that lacks a state, or has one of an object that is not here.  Raises `CheckpointError`."""
        member, _, if_new, if_missing = self._kind
        saved = state.object(member)
        for name in self._objects:
            if name not in saved.values:
                raise CheckpointError(
                    f"{state.path} holds no state for {self._label(name)}, which would begin anew. {if_new}"
                )
        for name in saved.values:
            if name not in self._objects and if_missing:
                raise CheckpointError(
                    f"{state.path} was saved with {self._label(name)}, and there is no such object now, which would"
                    f" begin anew. {if_missing.format(name=name)}"
                )
        for name, form in saved.values.items():
            check_form(saved, name, form, "what a save writes of such an object")

    def to_fill(self, stored: StoredCheckpoint) -> list[CheckpointShard]:
        """Return the tensors of all saved states, whether an object takes them or not."""
        forms: Any = stored.manifest.state[self._kind.member]
        self._tensors = rooms_for(stored, tensors_named(list(forms.values())))
        return list(form_shards(self._tensors, counts=False))

    def take(self, state: Mapping[str, Json]) -> None:
        """Give every object what was saved of it."""
        saved = cast(Mapping[str, Json], state[self._kind.member])
        for name, item in self._objects.items():
            item.load_state_dict(read_form(saved[name], self._tensors))
        self._tensors = {}
