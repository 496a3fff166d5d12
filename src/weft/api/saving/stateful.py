"""Objects with a `state_dict`, whose states one save takes and one load gives back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from weft.api.ranks.json_values import NoFormError, digest_of_form, form_pieces, read_form, tensors_named, write_form
from weft.api.saving.attached import Stateful
from weft.config.document import Json, JsonObject
from weft.errors import CheckpointError, RecipeError
from weft.run.checkpoint import StoredCheckpoint
from weft.techniques.core import Piece


class StatesBeside:
    """Objects by kind and name.  Their states must be equal on all ranks: one rank's is kept."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, Stateful]] = {}
        self._forms: dict[str, dict[str, Json]] | None = None
        self._tensors: dict[str, Tensor] = {}

    def add(self, kind: str, objects: Mapping[Any, Any]) -> None:
        """Take objects.  Raises `RecipeError` for what has no state to say."""
        for name, found in objects.items():
            if not isinstance(name, str) or not name or "/" in name:
                raise RecipeError(f"{kind} names an object {name!r}. Give it a text without slashes.")
            if isinstance(found, type) or not isinstance(found, Stateful):
                what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
                raise RecipeError(
                    f"{kind}[{name!r}] is {what}, which has no state to save. Give an object with state_dict() and"
                    " load_state_dict()."
                )
        self._objects[kind] = dict(objects)

    # ── saving ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def forms(self) -> dict[str, Json]:
        """Return the states as JSON, by kind and name.

        Raises:
            CheckpointError: one holds what is neither a plain value nor a tensor, with its place.
        """
        if self._forms is None:
            self._forms = {kind: self._written(kind, objects) for kind, objects in self._objects.items()}
        return cast(dict[str, Json], self._forms)

    def _written(self, kind: str, objects: Mapping[str, Stateful]) -> dict[str, Json]:
        try:
            return {
                name: write_form(each.state_dict(), f"{kind}/{name}", self._tensors) for name, each in objects.items()
            }
        except NoFormError as found:
            raise CheckpointError(
                f"{found.place.replace('/', '.')} is a {type(found.value).__name__}, which a save cannot hold: numbers,"
                " text, tensors, lists and dictionaries can be saved. Leave it out of state_dict()."
            ) from None

    def facts(self) -> dict[str, str]:
        """What must be equal on all ranks: a digest of every object's state."""
        return {
            f"the state of {kind}[{name!r}]": digest_of_form(form, self._tensors)
            for kind, forms in self.forms().items()
            for name, form in cast(dict[str, Json], forms).items()
        }

    def pieces(self, *, counts: bool) -> Iterator[Piece]:
        """Tensors of the states, to be written by the rank that `counts`."""
        self.forms()
        yield from form_pieces(self._tensors, counts=counts)

    # ── loading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, state: JsonObject) -> None:
        """Refuse a save that lacks a state.  Raises `CheckpointError`."""
        for kind, objects in self._objects.items():
            saved = state.object(kind)
            if missing := [name for name in objects if name not in saved.values]:
                raise CheckpointError(
                    f"{state.path} holds no state for {kind}[{missing[0]!r}], which would begin anew. Leave it out, or"
                    " load what was saved with it."
                )
            if kind == "extra" and (left := [name for name in saved.values if name not in objects]):
                raise CheckpointError(
                    f"{state.path} was saved with extra[{left[0]!r}], and this loop has no such object, which would"
                    f" begin anew. Write session.load(…, extra={{{left[0]!r}: …}})."
                )
            rooms = _Rooms()
            try:
                read_form(list(saved.values.values()), rooms)
            except (ValueError, TypeError, KeyError):
                raise state.fail(kind, "what session.save() writes") from None

    def to_fill(self, stored: StoredCheckpoint) -> list[Piece]:
        """Return the tensors of all saved states, whether an object takes them or not."""
        named = [name for kind in self._objects for name in tensors_named(_forms_of(stored.manifest.state, kind))]
        if lost := sorted(name for name in named if name not in stored.runs):
            raise CheckpointError(f"{stored.folder} lacks {lost[0]}, which its manifest names. Load an earlier one.")
        self._tensors = {name: torch.zeros(stored.shape(name), dtype=stored.dtype(name)) for name in sorted(named)}
        return list(form_pieces(self._tensors, counts=False))

    def take(self, state: Mapping[str, Json]) -> None:
        """Give every object what was saved of it."""
        for kind, objects in self._objects.items():
            for name, each in objects.items():
                each.load_state_dict(read_form(cast(Any, state)[kind][name], self._tensors))


class _Rooms(dict[str, Tensor]):
    """Stands for tensors that are not read yet."""

    def __missing__(self, name: str) -> Tensor:
        return torch.empty(0)


def _forms_of(state: Mapping[str, Any], kind: str) -> list[Json]:
    return list(state[kind].values())
