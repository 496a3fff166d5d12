"""Check the parts of a model that must stay as they were at `prepare`, or be equal on all ranks: modes, batch norms,
copies of state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.analysis.facts import facts_of_blueprint
from weft.api.ranks.agreement import LEFT
from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.errors import PlanError, RecipeError
from weft.model.blueprint import BATCH_NORMS, Blueprint, takes_statistics
from weft.techniques.build import ParallelModel
from weft.techniques.check import check_plan


def is_due(number: int) -> bool:
    """Whether something that is looked at ever more rarely is due: at powers of two, and at every thousandth."""
    return number & (number - 1) == 0 or number % 1_000 == 0


class FixedNorms:
    """The batch norms of a rank's `parts` that took no statistics of the batch when the plan was checked."""

    def __init__(self, parts: Iterable[nn.Module], blueprint: Blueprint, plan: Plan, recipe: Recipe) -> None:
        self._norms: Sequence[tuple[str, nn.Module]] = ()
        self._problem = ""
        every = [named for part in parts for named in part.named_modules() if isinstance(named[1], BATCH_NORMS)]
        if not every:
            return
        try:
            # Every other check has passed already.
            check_plan(plan, recipe, replace(facts_of_blueprint(blueprint, recipe), has_batch_norm=True))
        except PlanError as problem:
            self._norms = [(name, module) for name, module in every if not takes_statistics(module)]
            self._problem = str(problem)

    def check(self) -> None:
        """Refuse a step in which one of them takes statistics, under a plan that could not have that.

        Raises:
            RecipeError: it would.
        """
        for name, module in self._norms:
            if takes_statistics(module):
                raise RecipeError(
                    f"{name} ({type(module).__name__}) was in evaluation mode when session.prepare was given the model,"
                    f" and takes the statistics of the batch now. {self._problem}\nOr call eval() of it after each"
                    " model.train()."
                )


class ModuleModes:
    """Modes of a model that a loop may switch, and must switch on all ranks alike; stages have other parts of it.
    Modules and parameters are those that were there at `prepare`: to walk through them took 4 % of a step of 5 ms.

    Modules and parameters are those that were there at `prepare`: to walk through them took 4 % of a step of 5 ms.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model = model
        self._is_whole = plan.mesh.pipeline == 1
        self._modules, self._parameters = list(model.modules()), list(model.parameters())

    def facts(self) -> dict[str, str]:
        """What must be equal, by name."""
        facts = {"the model's training mode": str(self._model.training)}
        if self._is_whole:
            facts["the number of modules in training mode"] = str(sum(module.training for module in self._modules))
            num_trained = sum(parameter.requires_grad for parameter in self._parameters)
            facts["the number of parameters that want a gradient"] = str(num_trained)
        return facts


class CopiedState:
    """State that ranks must agree on in a step of their models: modes, and after steps 1, 2, 4, 8, … the buffers and
    frozen parameters that a forward or the loop has changed since they were prepared."""

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._modes = ModuleModes(model.module, model.plan)
        mesh, own = model.plan.mesh, model.mesh
        is_copied = mesh.data == mesh.world_size and model.summing.size("data") == own.size("data")
        self._saved = frozenset(model.module.state_dict(keep_vars=True)) if is_copied else frozenset[str]()
        self._first = {name: _state(value) for name, value in self._held().items()} if is_copied else {}

    def facts(self, steps: int) -> dict[str, str]:
        """What must be equal, by name, after so many steps."""
        modes = self._modes.facts()
        if steps <= 0 or not is_due(steps) or not self._first:
            return modes
        changed = {name: tensor for name, tensor in self._held().items() if _state(tensor) != self._first.get(name)}
        return modes | {f"{LEFT}{name}": digest_of(value) for name, value in changed.items()}

    def _held(self) -> dict[str, Tensor]:
        module = self._model.module
        saved = {name: buffer for name, buffer in module.named_buffers() if name in self._saved}
        saved |= {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
        return {name: tensor for name, tensor in saved.items() if not isinstance(tensor, DTensor)}


def _state(value: Tensor) -> tuple[int, int]:
    """Return a mark of a tensor that differs once it was written to."""
    return value.data_ptr(), value._version  # pyright: ignore[reportPrivateUsage]  # what autograd goes by


def digest_of(value: Tensor) -> str:
    """Shape and a digest of the values."""
    raw = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{tuple(value.shape)} {xxhash.xxh3_64_hexdigest(raw.numpy().data)}"
