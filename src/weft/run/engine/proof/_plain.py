"""Two steps as one writes them without Weft: forward, loss, backward, `clip_grad_norm_`, the optimizer's own step.

They run on the user's own objects before any plan has touched them, with the whole batch at once, and put everything
back.  So what is compared with a plan is plain PyTorch, and a fault of Weft's on one process shows, too.
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.comm.device import free_memory_bytes
from weft.formatting import format_memory
from weft.model.positions import call_model
from weft.run.engine.proof._snapshot import Snapshot
from weft.techniques.randomness.quiet import AmongRanksError, quiet

STEPS = 2
"""Two steps, because the second one reads what the first has written: weights, buffers and optimizer states."""
_LAST_DIGIT: Mapping[str, float] = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""Distance from 1 to the next number."""
_SEED = 20_261_127
_SMALL: Mapping[str, float] = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Size of a gradient's element, in terms of the root mean square of its tensor, below which a weight is blurred: at
1e-3 rounding by 1e-7 turns Adam's second step by 1e-4 of the learning rate."""

_COPIES = 9
"""Copies of the weights: before, gradients, two states of an optimizer, what two runs have made, and room."""
_STEPS_IN_ALL = 3 * STEPS
"""Steps in terms of the first one: these, as many again with weights moved by a rounding, and those under the plan."""

Budget = Callable[[float], float]
"""Seconds of the first step → seconds that the proof may take."""
Objective = Callable[[], tuple[Tensor, float]]
"""Forward and loss of the whole batch: the mean loss with all that is added to it, and the mean alone."""


@dataclass(slots=True, kw_only=True)
class PlainResult:
    """Results of the steps, as copies on the CPU."""

    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    """Norm of the whole gradient before clipping, by step."""
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """`gradient/<parameter>` of the first step; `weight/`, `buffer/` and `held/` after the last one."""
    blurred: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Name → where a tensor says nothing: weights whose gradients are so small beside the others of their tensor that
    they are made of rounding.  Adam and its kind divide by that size, and so move such a weight by a whole step."""
    noise: dict[str, float] = field(default_factory=dict[str, float])
    """Name → norm of what rounding alone changes of a tensor."""
    noise_of_losses: list[float] = field(default_factory=list[float])
    coarsest: float = 0.0
    """Distance from 1 to the next number in the narrowest dtype that an operator has returned: a model may compute its
    norms in fp32 and all else in fp64."""


class _TooLongError(Exception):
    """A step takes longer than the budget."""


@contextmanager
def generators_kept(device: torch.device) -> Generator[None]:
    """Seed the generators of torch, Python and NumPy alike on every rank, and put their states back afterwards."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def unheard() -> Generator[None]:
    """Leave out warnings: the first real step gives them again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(slots=True, kw_only=True)
class PlainSteps:
    """A model, its optimizer and its loss, as they are without a plan."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: object
    """Looked through for what the loss holds."""
    objective: Objective
    max_gradient_norm: float | None
    precision: str
    device: torch.device
    set_rates: Callable[[int], None] = lambda step: None
    """Sets the optimizer's rates for a step, where no scheduler of the user's does."""

    def run(self, budget: Budget) -> PlainResult | str:
        """Return what two steps compute and how far rounding carries in them, or why that is not known.

        Where the first step shows that all would take longer than the budget, no more are taken.  Not collective.
        """
        if reason := self._too_large():
            return reason
        snapshot = Snapshot(("model", self.model), ("loss", self.loss), ("optimizer", self.optimizer))
        # Run twice: as it is, and with weights moved by one rounding.  The distance of the two says how far rounding
        # alone carries in this model, which is what a plan, whose sums have another order, may differ by.
        try:
            outcome = self._steps(snapshot, budget)
            snapshot.put_back()
            self._nudge(max(outcome.coarsest, _LAST_DIGIT[self.precision]))
            moved = self._steps(snapshot, lambda step_seconds: math.inf)
            _measure_noise(outcome, moved)
        except (AmongRanksError, _TooLongError) as error:
            return str(error)
        except Exception as error:  # if it is the user's mistake, the first real step tells of it
            return f"plain PyTorch raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        finally:
            snapshot.put_back()
        if changed := snapshot.changed_but_kept():
            return f"{changed[0]} is changed by a step, and is too large to be put back"
        return outcome

    def _steps(self, snapshot: Snapshot, budget: Budget) -> PlainResult:
        outcome, started = PlainResult(), time.perf_counter()

        def look() -> None:
            taken = time.perf_counter() - started
            if not outcome.norms and taken * _STEPS_IN_ALL > (seconds := budget(taken)):
                raise _TooLongError(
                    f"a step by plain PyTorch takes more than {taken:.1f} s, and the proof may take {seconds:.0f} s in"
                    ' all (prove = "always" takes its time)'
                )

        with generators_kept(self.device), unheard():
            for step in range(STEPS):
                self.optimizer.zero_grad()
                with quiet([self.model], look=look) as ledger:
                    objective, mean = self.objective()
                    objective.backward()
                outcome.coarsest = max(outcome.coarsest, ledger.coarsest)
                if not math.isfinite(mean):
                    raise ArithmeticError(f"the loss of step {step + 1} is {mean}")
                outcome.losses.append(mean)
                look()  # a last operator may have taken long
                # Before clipping and before the optimizer, which may write to gradients.
                if step == 0:
                    outcome.tensors |= self._gradients()
                self._blur(outcome)
                trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
                limit = math.inf if self.max_gradient_norm is None else self.max_gradient_norm
                outcome.norms.append(float(nn.utils.clip_grad_norm_(trained, limit)))
                self.set_rates(step)
                self.optimizer.step()
            outcome.tensors |= self._state(snapshot)
        return outcome

    def _too_large(self) -> str:
        """Why this process cannot hold what is computed beside the model; empty: it can."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        needed, free = _COPIES * weights, free_memory_bytes(self.device)
        if needed <= free:
            return ""
        return (
            f"its weights take {format_memory(weights)}, so that plain steps take {format_memory(needed)}, and"
            f" {format_memory(free)} are free here (`weft check` proves a smaller model of the kind)"
        )

    def _gradients(self) -> dict[str, Tensor]:
        of_model = {f"gradient/{name}": p for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: _gradient(parameter) for name, parameter in of_model.items()} | gradients_of_loss(self.loss)

    def _state(self, snapshot: Snapshot) -> dict[str, Tensor]:
        weights = {f"weight/{name}": _copied(parameter) for name, parameter in self.model.named_parameters()}
        saved = set(self.model.state_dict())
        buffers = {f"buffer/{name}": _copied(value) for name, value in self.model.named_buffers() if name in saved}
        return weights | buffers | held_tensors(self.model, snapshot)

    @torch.no_grad()
    def _blur(self, outcome: PlainResult) -> None:
        """Note the weights whose gradients are too small to say where a step takes them.  One of zero is no such."""
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided or not gradient.numel():
                continue
            size = gradient.abs()
            # An optimizer of Adam's kind divides by the size of the gradient: an element that is made of rounding moves
            # its weight by a whole step in a direction that rounding chose.
            root = float(torch.linalg.vector_norm(size, dtype=torch.float64)) / math.sqrt(size.numel())
            small = ((size > 0) & (size < _SMALL[self.precision] * root)).cpu()
            before = outcome.blurred.get(f"weight/{name}")
            outcome.blurred[f"weight/{name}"] = small if before is None else before | small

    @torch.no_grad()
    def _nudge(self, last_digit: float) -> None:
        """Move every weight by its last digit, up or down: what follows shows how far rounding carries."""
        generator = torch.Generator().manual_seed(_SEED)
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                signs = 2.0 * torch.randint(2, parameter.shape, generator=generator).to(parameter) - 1.0
                parameter.mul_(1.0 + signs * last_digit)


def objective_of(model: nn.Module, inputs: Mapping[str, Tensor], loss: Callable[..., Any], batch: Any) -> Objective:
    """Return forward and loss as one writes them: a (sum, count) is divided, terms over the batch are added."""

    def objective() -> tuple[Tensor, float]:
        outputs = call_model(model, inputs)
        result = loss(outputs, batch)
        if isinstance(result, tuple) and not float(result[1]) > 0:
            raise ValueError(f"the loss counts {float(result[1]):g} samples")
        mean: Tensor = result[0] / result[1] if isinstance(result, tuple) else result
        total = mean
        for term in getattr(loss, "auxiliary", {}).values():
            sums, count = term.sums(outputs, batch)
            total = total + term.weight * term.value(sums / count)
        return total, float(mean.detach())

    return objective


def gradients_of_loss(loss: object) -> dict[str, Tensor]:
    """Return copies of the gradients of the parameters that a loss module has."""
    if not isinstance(loss, nn.Module):
        return {}
    return {f"gradient/loss.{name}": _gradient(p) for name, p in loss.named_parameters() if p.requires_grad}


def held_tensors(model: nn.Module, snapshot: Snapshot) -> dict[str, Tensor]:
    """Return the tensors, as they are now, that a model or its loss holds beside parameters and saved buffers."""
    known = {f"model.{name}" for name in (*dict(model.named_parameters()), *model.state_dict())}
    return {
        f"held/{name}": _copied(value)
        for name, value in snapshot.now()
        if name not in known and not name.startswith("optimizer.") and not isinstance(value, nn.Parameter)
        if value.shape == snapshot.initial(name).shape
    }


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    return _copied(gradient.to_dense() if gradient.layout != torch.strided else gradient)


def _measure_noise(outcome: PlainResult, moved: PlainResult) -> None:
    for name, tensor in outcome.tensors.items():
        other = moved.tensors.get(name)
        if other is not None and other.shape == tensor.shape:
            seen = ~outcome.blurred[name] if name in outcome.blurred else ...
            outcome.noise[name] = distance_of(tensor[seen], other[seen])
    outcome.noise_of_losses = [abs(a - b) for a, b in zip(outcome.losses, moved.losses, strict=True)]


def distance_of(one: Tensor, other: Tensor | None = None) -> float:
    """Norm of a tensor, or of the difference of two, summed in fp64."""
    if not (one.is_floating_point() or one.is_complex()):
        one, other = one.double(), None if other is None else other.double()
    # Subtracted in their own dtype, where numbers that lie close lose nothing, and without copies in fp64.
    delta = one if other is None else one - other
    return float(torch.linalg.vector_norm(delta, dtype=torch.complex128 if delta.is_complex() else torch.float64))
