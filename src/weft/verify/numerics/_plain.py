"""The recipe as one writes it without Weft: module, plain optimizer, `clip_grad_norm_`, a loop.

A plan is compared with one process, and both run Weft's engine; what is wrong in both would not show.  This loop shares
nothing with the engine but the model, the samples, the learning rate and the initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.model.blueprint import Batch, Blueprint
from weft.run.engine.proof import optimizer_of, set_rates, whole_module
from weft.run.worker._trial_data import TrialData
from weft.techniques.randomness.draws import keyed_alone
from weft.verify.numerics._comparison import TrialResult
from weft.verify.numerics._keep_fp64 import KeepFp64
from weft.verify.numerics._trial import InnerCasts, one_process


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLoop:
    """A training loop in plain PyTorch, from given initial weights, in fp64."""

    recipe: Recipe
    plan: Plan
    label_range: int | None
    inside: InnerCasts = "wide"

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self.recipe.run.steps

    def run(self, blueprint: Blueprint, initial: Mapping[str, Tensor]) -> TrialResult:
        """Return losses, gradients and weights; `initial` is named as in `TrialResult.initial`.

        The blueprint must have no dropout modules, whose masks are Weft's own; what it draws by functions is given the
        same keyed numbers.
        """
        module = _module(blueprint, initial)
        data = TrialData(
            blueprint, one_process(self.plan), data_index=0, seed=self.recipe.run.seed, label_range=self.label_range
        )
        losses: list[float] = []
        norms: list[float] = []
        gradients: dict[str, Tensor] = {}
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        optimizer = optimizer_of(self.recipe, trained)
        run = keyed_alone(module, blueprint, self.recipe.run.seed)
        for step in range(self.steps):
            (batch,) = data.microbatches(step)
            module.zero_grad()
            with KeepFp64(watches_only=self.inside != "wide"):
                total, count = run(_inputs(blueprint, batch), batch, step)
                (total / count).backward()
            # A trial's gradients are those of the loss sum times 1 / global batch size; these are of the mean.
            if step == 0:
                scale = float(count) / self.recipe.batch.global_batch_size
                gradients = {f"gradient/{name}": _gradient(p) * scale for name, p in trained.items()}
            norm = self._clip(list(trained.values()))
            losses.append(float(total.detach() / count))
            norms.append(norm)
            self._step(optimizer, step)
        return TrialResult(
            initial={}, gradients=gradients, state=_state(module), losses=losses, norms=norms, validation=0.0
        )

    def _clip(self, parameters: list[Tensor]) -> float:
        limit = self.recipe.optimizer.max_grad_norm
        return float(nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit))

    def _step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        set_rates(self.recipe, optimizer, step)
        optimizer.step()


def without_dropout(build: Callable[[], Blueprint]) -> Callable[[], Blueprint]:
    """Return a builder of the same model whose dropout modules let everything pass."""

    def quiet() -> Blueprint:
        blueprint = build()
        for module in blueprint.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return blueprint

    return quiet


def comparable(result: TrialResult, steps: int) -> TrialResult:
    """Return of one process's result what a plain loop of so many steps also has."""
    return replace(result, initial={}, losses=result.losses[:steps], norms=result.norms[:steps], validation=0.0)


def _module(blueprint: Blueprint, initial: Mapping[str, Tensor]) -> nn.Module:
    """The whole model in fp64 with the given weights, in training mode."""
    module = whole_module(blueprint, 0, torch.device("cpu"), torch.float64)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, tensor in initial.items():
            tensors[name.partition("/")[2]].copy_(tensor)
    return module.train()


def _inputs(blueprint: Blueprint, batch: Batch) -> dict[str, Tensor]:
    fields = {keyword: batch[name] for keyword, name in blueprint.inputs.items() if name in batch}
    return {name: value.double() if value.is_floating_point() else value for name, value in fields.items()}


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()


def _state(module: nn.Module) -> dict[str, Tensor]:
    saved = set(module.state_dict())
    buffers = {f"buffer/{name}": buffer for name, buffer in module.named_buffers() if name in saved}
    return {f"model/{name}": parameter.detach() for name, parameter in module.named_parameters()} | buffers
