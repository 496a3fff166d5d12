"""One optimizer over the parameters of several models, as scripts make it that train an encoder beside a denoiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from weft.api.loop.open_step import SCHEDULED, OpenModel, ReplacedMethods, refuse_closure
from weft.api.saving.optimizer import cuts_of
from weft.errors import RecipeError


@final
class SharedOptimizer:
    """The user's object, and one of its kind for each of the models, with the same settings.

    Its step is that of all models whose backwards have come; its settings are the user's to change, as by a scheduler.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises `RecipeError` for an optimizer that may look at what its parameters are together."""
        if cuts_of(optimizer) != "anywhere":
            raise RecipeError(
                f"the {type(optimizer).__name__} holds parameters of several models, and may look at all of them"
                " together, where each model is updated by itself. Make one for each model."
            )
        self.optimizer = optimizer
        self._models: list[OpenModel] = []
        self._methods = ReplacedMethods()
        self._put()

    def part_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of the same kind over the parameters of one model."""
        own = {id(parameter) for parameter in model.parameters()}
        groups: list[dict[str, Any]] = [
            {**group, "params": [parameter for parameter in group["params"] if id(parameter) in own]}
            for group in self.optimizer.param_groups
        ]
        made = type(self.optimizer).__new__(type(self.optimizer))
        torch.optim.Optimizer.__init__(made, [parameter for group in groups for parameter in group["params"]], {})
        made.defaults, made.param_groups = self.optimizer.defaults, groups
        return made

    def add(self, model: OpenModel, taken: nn.Module) -> None:
        """A model has begun; `taken` are its parameters, in whose place the user's object has what the model's holds: a
        loop may write into it."""
        gone = {id(parameter) for parameter in taken.parameters()}
        for group, own in zip(self.optimizer.param_groups, model.optimizer.param_groups, strict=True):
            left = [parameter for parameter in group["params"] if id(parameter) not in gone]
            group["params"] = [*left, *own["params"]]
        self._models.append(model)

    def take_settings(self) -> None:
        """The settings that a load gave the models' optimizers are the user's object's."""
        for model in self._models[:1]:
            for mine, own in zip(self.optimizer.param_groups, model.optimizer.param_groups, strict=True):
                mine.update({name: value for name, value in own.items() if name != "params"})

    def give_settings(self) -> None:
        """The models' optimizers have what the user has made of the settings."""
        for model in self._models:
            self._give_settings(model)

    def _give_settings(self, model: OpenModel) -> None:
        for mine, own in zip(self.optimizer.param_groups, model.optimizer.param_groups, strict=True):
            own.update({name: value for name, value in mine.items() if name != "params"})

    def _put(self) -> None:
        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
            refuse_closure(closure)
            for model in self._models:
                self._give_settings(model)
                model.step()
            vars(self.optimizer)["_opt_called"] = True  # what schedulers look for

        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            for model in self._models:
                model.zero_grad(leaves_zeros=not set_to_none)
            for group in self.optimizer.param_groups:  # of models that were not called yet
                for parameter in group["params"]:
                    parameter.grad = None

        def refuse(_: torch.optim.Optimizer, *__: Any) -> Any:
            raise RecipeError(
                f"the states of this {type(self.optimizer).__name__} lie with each of its {len(self._models)} models."
                " Save them by session.save(folder), and load them by session.load(folder)."
            )

        setattr(step, SCHEDULED, True)
        self._methods.put(self.optimizer, step=step, zero_grad=zero_grad, state_dict=refuse, load_state_dict=refuse)

    def restore(self) -> None:
        """Give the user's object its methods back."""
        self._methods.put_back()
