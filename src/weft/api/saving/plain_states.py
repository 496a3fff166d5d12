"""`optimizer.state_dict()` and `load_state_dict()` of a plain loop, in torch's own form: whole parameters by number.

Where every rank has all of each parameter, what a script saves by itself is what it would save without Weft.  What it
loads, each rank cuts to its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.api.saving.optimizer_states import HeldRun
from weft.errors import RecipeError


@dataclass(frozen=True, slots=True)
class PlainStates:
    """An optimizer over this rank's runs, and how plain PyTorch would number its parameters.

    `groups`: parameter → its group, for all that the optimizer was given, in its order; the same on all ranks.
    """

    optimizer: torch.optim.Optimizer
    runs: Sequence[HeldRun]
    groups: Mapping[str, int]

    def whole(self, refusal: str) -> dict[str, Any]:
        """Return what plain PyTorch's `state_dict` would.

        Raises:
            RecipeError: this rank has parts of parameters; its text is `refusal`.
        """
        if any(not run.segment.is_whole or run.segment.local_shape != run.segment.layout.shape for run in self.runs):
            raise RecipeError(refusal)
        found, numbers = type(self.optimizer).state_dict(self.optimizer), self._numbers()
        ordered = self._ordered()
        states = {
            numbers[ordered[local].name]: {key: _shaped(value, ordered[local]) for key, value in kept.items()}
            for local, kept in found["state"].items()
        }
        groups = [
            {**group, "params": [numbers[name] for name, own in self.groups.items() if own == index]}
            for index, group in enumerate(found["param_groups"])
        ]
        return {**found, "state": states, "param_groups": groups}

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

    def _ordered(self) -> list[HeldRun]:
        """The runs by the numbers that torch gives them on this rank."""
        by_view = {id(run.view): run for run in self.runs}
        return [by_view[id(view)] for group in self.optimizer.param_groups for view in group["params"]]


class CarriedState:
    """What an optimizer had before its model was brought under a plan: taken from it, and given back cut to shares."""

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


def _shaped(value: Any, run: HeldRun) -> Any:
    if not isinstance(value, Tensor) or value.shape != run.view.shape:
        return value
    return value.view(run.segment.local_shape)


def _cut(value: Any, run: HeldRun) -> Any:
    layout, start = run.segment.layout, run.segment.start
    if not isinstance(value, Tensor) or not value.ndim or value.shape != layout.shape:
        return value
    if run.segment.local_shape != layout.shape:
        raise RecipeError(
            f"optimizer.load_state_dict() was given states of {layout.name} as a whole, of which this rank has a part"
            " over the tensor axis. Write `session.load(folder)` for what session.save() has written."
        )
    return value.reshape(-1)[start : start + run.segment.length].view(run.view.shape)
