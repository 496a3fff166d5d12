"""What a user's optimizer keeps, as checkpoints hold it: read off the optimizer, and given back without calling it.

An optimizer keeps states by parameter, settings in its groups, what it wants under keys of its own in `state`, and
attributes.  States that are tensors travel as checkpoint shards, so that any plan loads them; all else is written as
JSON.  A checkpoint lacks the states that a parameter has not yet, because it took no step.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

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
from weft.errors import CheckpointError, PlanError, RecipeError
from weft.run.checkpoint import StoredCheckpoint
from weft.techniques.core import CheckpointShard, NestedSplit, Segment, Shard

_STATES, _OWN = "optimizer/", "kept/"
"""Prefixes of stored names: a state of a parameter; what is kept beside these."""
_WITHOUT_STATE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type),
    *(torch.dtype, torch.device),
)
"""Kinds of attributes that say what an optimizer does, not what it has done."""

_WRITTEN = "what save() writes of an optimizer"
_GatherTexts = Callable[[str], Sequence[str]]


class StateRun(NamedTuple):
    """A run of a parameter that this rank updates, as the optimizer has it."""

    shard: Shard
    segment: Segment
    view: Tensor

    @property
    def name(self) -> str:
        return self.segment.layout.name

    @property
    def is_whole(self) -> bool:
        """Whether the optimizer has the parameter in its own shape."""
        return self.view.shape == self.segment.layout.shape and self.segment.is_whole

    @property
    def holds_first(self) -> bool:
        """Whether the first element of the whole parameter lies in this run: one rank's does, and it writes what there
        is once for each parameter."""
        return self.segment.start == 0 and self.segment.layout.split.index == 0


class RankStates:
    """The states of one optimizer on this rank."""

    def __init__(self, optimizer: torch.optim.Optimizer, runs: Sequence[StateRun]) -> None:
        self._optimizer, self._runs = optimizer, runs
        self._kind = type(optimizer).__name__
        self._incoming: dict[int, dict[str, Tensor]] | None = None
        """States that a load fills, by run."""
        self._others: dict[str, Tensor] = {}
        """Further tensors that it fills, by their stored names."""

    # ── saving ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def facts(self) -> dict[str, str]:
        """Return the facts beside the settings of the groups that must be equal on all ranks."""
        forms, tensors = self._own_forms()
        return {
            f"{self._kind}'s {name.replace('_', ' ')}": digest_of_form(forms[name], tensors)
            for name in ("attributes", "own_states")
        }

    def state(self, gather: _GatherTexts) -> dict[str, Json]:
        """Return what is no tensor, for a checkpoint.  Call on every rank: `gather` returns every rank's text.

        Raises:
            CheckpointError: something has no form in a checkpoint, with its name.
            RecipeError: on every rank; ranks that hold the same parameter keep other things for it.
        """
        forms, _ = self._own_forms()
        mine = {run.name: form for run in self._runs if (form := self._parameter_form(run, {})) is not None}
        parameters: dict[str, Json] = {}
        # Ranks hold other parameters each; values that are no tensors go into one manifest.
        for text in gather(json.dumps(mine)):
            for name, found in cast(dict[str, Json], json.loads(text)).items():
                if parameters.setdefault(name, found) != found:
                    raise RecipeError(
                        f"what the {self._kind} keeps for {name} differs between the ranks: {parameters[name]} and"
                        f" {found}. Let its step do the same on every rank."
                    )
        keeps: dict[str, Json] = {
            "class": self._kind,
            "attributes": forms["attributes"],
            "own_states": forms["own_states"],
            "parameters": parameters,
        }
        return {"optimizer": forms["groups"], "optimizer_keeps": keeps}

    def checkpoint_shards(self) -> Iterator[CheckpointShard]:
        """Yield the tensors by parameter, or while a load is under way those that it fills."""
        for index, run in enumerate(self._runs):
            if self._incoming is not None:
                yield from (self._stored(run, key, value) for key, value in self._incoming[index].items())
                continue
            for key, value in self._optimizer.state.get(run.view, {}).items():
                if isinstance(value, Tensor):
                    yield self._stored(run, key, value)
            inside: dict[str, Tensor] = {}
            self._parameter_form(run, inside)
            yield from form_shards(inside, counts=run.shard.counts)

    def own_shards(self, *, counts: bool) -> Iterator[CheckpointShard]:
        """Yield all other tensors, to be written by the rank that `counts`; while a load is under way, those that it
        fills."""
        yield from form_shards(self._own_forms()[1] if self._incoming is None else self._others, counts=counts)

    def _own_forms(self) -> tuple[dict[str, Json], dict[str, Tensor]]:
        """Forms of groups, attributes and states of the optimizer's own, and the tensors that these name."""
        tensors: dict[str, Tensor] = {}
        groups: list[Json] = [
            {
                name: self._form(value, f"groups/{index}/{name}", tensors)
                for name, value in group.items()
                if name != "params"
            }
            for index, group in enumerate(self._optimizer.param_groups)
        ]
        attributes = self._form(own_attributes(self._optimizer), "attributes", tensors)
        # States by parameter are saved as runs of it; any other key is the optimizer's own.
        views = {id(run.view) for run in self._runs}
        states: dict[str, Any] = {}
        for key, value in cast(Mapping[Any, Any], self._optimizer.state).items():
            if id(key) in views:
                continue
            if not isinstance(key, str):
                raise PlanError(
                    f"the {self._kind} keeps states for a {type(key).__name__} that is no parameter of its groups, so"
                    " they cannot be saved. Let it keep them by parameter, or by a text."
                )
            states[key] = value
        own = self._form(states, "own", tensors)
        return {"groups": groups, "attributes": attributes, "own_states": own}, tensors

    def _parameter_form(self, run: StateRun, tensors: dict[str, Tensor]) -> Json:
        """The form of all that is kept for a parameter and is no tensor, None where there is nothing; `tensors` takes
        those that it names."""
        entries: dict[str, Any] = {}
        for key, value in self._optimizer.state.get(run.view, {}).items():
            if not isinstance(key, str) or "/" in key:
                raise PlanError(
                    f"the {self._kind} names a state of {run.name} {key!r}, and a checkpoint wants a text without"
                    " slashes. Rename it."
                )
            if not isinstance(value, Tensor):
                entries[key] = value
        form = self._form(entries, f"parameters/{run.name}", tensors) if entries else None
        if tensors and not run.is_whole:
            raise PlanError(
                f"the {self._kind} keeps lists of tensors for {run.name}, which this plan cuts, so they cannot be"
                " saved. Use data_parallel.zero = 0 and mesh.tensor = 1."
            )
        return form

    def _form(self, value: Any, place: str, tensors: dict[str, Tensor]) -> Json:
        try:
            return write_form(value, _OWN + place, tensors)
        except NoFormError as found:
            self._refuse_form(found)

    def _refuse_form(self, problem: NoFormError) -> NoReturn:
        kind, *names = problem.place.removeprefix(_OWN).split("/")
        places = {
            "groups": lambda: f"{'.'.join(names[1:])} (group {names[0]})",
            "attributes": lambda: f"attribute {'.'.join(names)}",
            "own": lambda: f"state {'.'.join(names)}",
            "parameters": lambda: f"state {'.'.join(names[1:])} of {names[0]}",
        }
        raise CheckpointError(
            f"the {self._kind}'s {places[kind]()} is a {type(problem.value).__name__}, which a checkpoint cannot hold:"
            " numbers, text, tensors, lists, tuples and dictionaries can be saved. Keep it outside of the optimizer, or"
            " as one of these."
        )

    def _stored(self, run: StateRun, key: str, value: Tensor) -> CheckpointShard:
        layout = run.segment.layout
        # A state of the parameter's shape is cut as the parameter is, and any later plan can cut it otherwise; one
        # number (a count of steps) is stored whole.
        if value.shape == run.view.shape:
            shape, split, start, counts = layout.shape, layout.split, run.segment.start, run.shard.counts
        else:
            if value.numel() != 1 and not run.is_whole:
                raise PlanError(
                    f"the state {key!r} of {self._kind} has shape {tuple(value.shape)} for {run.view.numel():,}"
                    f" elements of {run.name}, so it cannot be saved. Use data_parallel.zero = 0 and mesh.tensor = 1."
                )
            shape, split, start = value.shape, NestedSplit(), 0
            # Of the ranks that hold runs of one parameter the first writes a state that all share.
            counts = run.shard.counts and run.holds_first
        return CheckpointShard(
            name=f"{_STATES}{key}/{run.name}",
            shape=shape,
            tensor=value.detach().reshape(-1),
            split=split,
            start=start,
            counts=counts,
        )

    # ── loading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, state: JsonObject) -> None:
        """Refuse what `state` cannot have returned for this optimizer.

        Raises:
            CheckpointError: names file and place.
        """
        groups, mine = list(state.objects("optimizer")), self._optimizer.param_groups
        if len(groups) != len(mine):
            raise state.fail("optimizer", f"a list of {len(mine)} parameter groups, as the optimizer has")
        # A save of the same class has all of its settings; another's may lack or add some.
        knows_all = False
        if "optimizer_keeps" in state.values:
            keeps = state.object("optimizer_keeps")
            keeps.only(("class", "attributes", "own_states", "parameters"))
            knows_all = keeps.text("class") == self._kind
            for name in ("attributes", "own_states"):
                check_form(keeps, name, keeps.values[name], _WRITTEN)
            parameters = keeps.object("parameters")
            for name, form in parameters.values.items():
                check_form(parameters, name, form, _WRITTEN)
        for group, own in zip(groups, mine, strict=True):
            for name, form in group.values.items():
                if name == "params" or (name not in own and not knows_all):
                    raise group.fail(name, f"a setting of the {self._kind}'s group")
                _check_setting(group, name, form, own.get(name))

    def expect(self, stored: StoredCheckpoint) -> None:
        """Make tensors for all that a checkpoint holds; `checkpoint_shards` and `own_shards` yield them until `forget`.

        Raises:
            CheckpointError: it holds a state in a shape that this plan cuts, or lacks one that it names.
        """
        keys: dict[str, list[str]] = {}
        for name in stored.runs:
            if name.startswith(_STATES):
                key, _, parameter = name.removeprefix(_STATES).partition("/")
                keys.setdefault(parameter, []).append(key)
        self._incoming = {
            index: {key: self._room(stored, run, key) for key in keys.get(run.name, ())}
            for index, run in enumerate(self._runs)
        }
        self._others = rooms_for(stored, tensors_named(list(_forms_in(stored.manifest.state))))

    def _room(self, stored: StoredCheckpoint, run: StateRun, key: str) -> Tensor:
        name = f"{_STATES}{key}/{run.name}"
        shape, dtype = stored.shape(name), stored.dtype(name)
        if shape == run.segment.layout.shape:
            return torch.zeros(run.view.shape, dtype=dtype, device=run.view.device)
        if shape.numel() != 1 and not run.is_whole:
            raise CheckpointError(
                f"{stored.folder} holds the state {key!r} of {run.name} in the shape {tuple(shape)}, and this plan cuts"
                " the parameter. Load it with data_parallel.zero = 0 and mesh.tensor = 1."
            )
        return torch.zeros(shape, dtype=dtype, device=self._device_of(run, key))

    def _device_of(self, run: StateRun, key: str) -> torch.device:
        """Return the device of a state, as torch's own `load_state_dict` chooses it: counts of steps stay with the
        host."""
        group = self._optimizer.param_groups[run.shard.group]
        on_host = key == "step" and not group.get("capturable") and not group.get("fused")
        return torch.device("cpu") if on_host else run.view.device

    def take(self, state: Mapping[str, Json]) -> None:
        """Give the optimizer what `expect` has made room for, filled, and what is no tensor."""
        assert self._incoming is not None, "nothing was expected"
        keeps = cast(Mapping[str, Any], state.get("optimizer_keeps") or {})
        parameters = cast(Mapping[str, Json], keeps.get("parameters", {}))
        for key in [key for key in keys_of(self._optimizer) if keeps or isinstance(key, Tensor)]:
            del self._optimizer.state[key]
        for index, run in enumerate(self._runs):
            form = parameters.get(run.name)
            others = {} if form is None else self._read(form, run.view.device)
            if incoming := self._incoming[index] | others:
                self._optimizer.state[run.view] = incoming
        device = next((run.view.device for run in self._runs), None)
        if keeps:
            self._optimizer.state.update(self._read(keeps["own_states"], device))
            for name, value in self._read(keeps["attributes"], device).items():
                setattr(self._optimizer, name, value)
        for group, saved in zip(self._optimizer.param_groups, cast(Any, state["optimizer"]), strict=True):
            group.update({name: self._read(form, device) for name, form in saved.items()})

    def forget(self) -> None:
        """End a load, whether it came to its end or not."""
        self._incoming, self._others = None, {}

    def _read(self, form: Json, device: torch.device | None) -> Any:
        return read_form(form, self._others, device)


def keys_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what an optimizer keeps states for: parameters, and whatever else it likes."""
    return list(cast(Mapping[Any, Any], optimizer.state))


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer has in attributes beside what every one of torch's has, and what has a state."""
    plain = vars(torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.1))
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in plain and not isinstance(value, _WITHOUT_STATE)
    }


def _forms_in(state: Mapping[str, Json]) -> Iterator[Json]:
    """Yield all forms that `RankStates.state` has put into a checkpoint's state."""
    for group in cast(list[dict[str, Json]], state["optimizer"]):
        yield from group.values()
    keeps = cast(dict[str, Any], state.get("optimizer_keeps") or {})
    yield from (keeps[name] for name in ("attributes", "own_states") if name in keeps)
    yield from keeps.get("parameters", {}).values()


def _check_setting(group: JsonObject, name: str, form: Any, mine: Any) -> None:
    """Refuse a form that is none, or is of another kind than the setting here."""
    plain = isinstance(form, bool | int | float | str) and isinstance(mine, bool | int | float | str)
    if not plain:
        check_form(group, name, form, _WRITTEN)
    elif isinstance(form, bool) != isinstance(mine, bool) or isinstance(form, str) != isinstance(mine, str):
        raise group.fail(name, f"a {type(mine).__name__}")
    elif isinstance(form, int | float) and not isinstance(form, bool):
        group.number(name, least=-1e30, most=1e30)


@dataclass(frozen=True, slots=True)
class PlainStates:
    """`state_dict()` and `load_state_dict()` of an optimizer over this rank's runs, in torch's own form: whole
    parameters by number.  What is loaded, each rank cuts to its share.

    `groups`: parameter → its group, for all that the optimizer was given, in its order; the same on all ranks.
    """

    optimizer: torch.optim.Optimizer
    runs: Sequence[StateRun]
    groups: Mapping[str, int]

    def full(self, refusal: str) -> dict[str, Any]:
        """Return what plain PyTorch's `state_dict` would.

        Raises:
            RecipeError: this rank has parts of parameters; its text is `refusal`.
        """
        if any(not run.segment.is_whole or run.segment.local_shape != run.segment.layout.shape for run in self.runs):
            raise RecipeError(refusal)
        state, numbers = type(self.optimizer).state_dict(self.optimizer), self._numbers()
        ordered = self._ordered()
        states = {
            numbers[ordered[local].name]: {key: _shaped(value, ordered[local]) for key, value in kept.items()}
            for local, kept in state["state"].items()
        }
        groups = [
            {**group, "params": [numbers[name] for name, own in self.groups.items() if own == index]}
            for index, group in enumerate(state["param_groups"])
        ]
        return {**state, "state": states, "param_groups": groups}

    def take(self, given: Mapping[str, Any]) -> None:
        """Give the optimizer its share of what plain PyTorch's `state_dict` has returned.

        Raises:
            RecipeError: it is of another optimizer, or the plan cuts a parameter over tensor ranks.
        """
        sizes = [len(group["params"]) for group in given["param_groups"]]
        own = [list(self.groups.values()).count(index) for index in range(len(self.optimizer.param_groups))]
        if sizes != own:
            raise RecipeError(
                f"optimizer.load_state_dict() was given groups of {sizes} parameters, and the optimizer has groups of"
                f" {own}. Load the state of an optimizer that was made over the same parameters."
            )
        ordered, numbers = self._ordered(), self._numbers()
        states: dict[int, Any] = {}
        for local, run in enumerate(ordered):
            kept = given["state"].get(numbers[run.name])
            if kept is not None:
                states[local] = {key: _cut(value, run) for key, value in kept.items()}
        places = iter(range(len(ordered)))
        groups = [
            {**group, "params": [next(places) for _ in mine["params"]]}
            for group, mine in zip(given["param_groups"], self.optimizer.param_groups, strict=True)
        ]
        type(self.optimizer).load_state_dict(self.optimizer, {**given, "state": states, "param_groups": groups})

    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.groups)}

    def _ordered(self) -> list[StateRun]:
        """The runs by the numbers that torch gives them on this rank."""
        by_view = {id(run.view): run for run in self.runs}
        return [by_view[id(view)] for group in self.optimizer.param_groups for view in group["params"]]


class CarriedState:
    """The state of an optimizer from before its model was brought under a plan: taken from it, and given back cut to
    shares."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._held = dict(optimizer.state)
        self._state = optimizer.state_dict() if self._held else None
        optimizer.state.clear()

    def put_back(self) -> None:
        """The model was not brought under a plan."""
        self._optimizer.state.update(self._held)

    def give(self, load: Callable[[Mapping[str, Any]], None]) -> None:
        """The model was: `load` takes states of whole parameters."""
        if self._state is not None:
            load(self._state)


def _shaped(value: Any, run: StateRun) -> Any:
    if not isinstance(value, Tensor) or value.shape != run.view.shape:
        return value
    return value.view(run.segment.local_shape)


def _cut(value: Any, run: StateRun) -> Any:
    layout, start = run.segment.layout, run.segment.start
    if not isinstance(value, Tensor) or not value.ndim or value.shape != layout.shape:
        return value
    if run.segment.local_shape != layout.shape:
        raise RecipeError(
            f"optimizer.load_state_dict() was given states of {layout.name} as a whole, of which this rank has a part"
            " over the tensor axis. Write `session.load(folder)` for what session.save() has written."
        )
    return value.reshape(-1)[start : start + run.segment.length].view(run.view.shape)
