"""Gradients between two steps: those that a loop may not change, and those of parameters that only a loss holds."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, final
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from weft.api.ranks.agreement import check_same_facts
from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.errors import RecipeError
from weft.events import StepEvent

_DEEPEST = 6


class LeftGradients:
    """Gradients that a step has left in the parameters: what a loop does to them afterwards has no effect."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        left = [(name, parameter, parameter.grad) for name, parameter in parameters]
        # Weak, so that a loop which sets its gradients to None gets their memory back.
        self._left = [(name, parameter, ref(grad), grad._version) for name, parameter, grad in left if grad is not None]

    def check(self) -> None:
        """Refuse gradients that were changed since, to something else than zero.

        Raises:
            RecipeError: there are some; the first is named.
        """
        for name, parameter, left, version in self._left:
            grad = left()
            if grad is not None and parameter.grad is grad and grad._version != version and bool(grad.any()):
                raise RecipeError(
                    f"the gradient of {name} was changed after state.step(), as torch.nn.utils.clip_grad_norm_ and"
                    " clip_grad_value_ do: without effect, the step had updated the weights by then. Clip by"
                    " session.prepare(…, max_grad_norm=1.0), whose norm is that of the whole gradient"
                    " (state.step(batch).gradient_norm); mask or scale a gradient in the model's forward."
                )


class WatchedGradients:
    """Gradients of a rank that are part of a sum over the ranks: nobody else may change them until that is made."""

    def __init__(self, model: nn.Module, when: str, instead: str) -> None:
        """`when` they may not be changed, and what to write `instead`: both stand in the error."""
        self._parameters = [
            (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self._when, self._instead = when, instead
        self._seen: list[tuple[Tensor | None, int]] = []

    def note(self) -> None:
        """Note the present gradients as right."""
        grads = [parameter.grad for _, parameter in self._parameters]
        self._seen = [(None, 0) if grad is None else (grad, grad._version) for grad in grads]

    def check(self) -> None:
        """Refuse gradients that were changed since `note`.

        Raises:
            RecipeError: the first is named.
        """
        for (name, parameter), (grad, version) in zip(self._parameters, self._seen, strict=False):
            now = parameter.grad
            if now is not grad or (now is not None and now._version != version):
                raise RecipeError(
                    f"the gradient of {name} was changed {self._when}: it is this rank's part of a sum that is not made"
                    f" yet. {self._instead}"
                )


@final
class LossParameters:
    """Parameters that a loss can reach and the model has not.  What a step adds to their gradients becomes what one
    process would have added; they stay the loop's in all else.  Create and call it on every rank alike."""

    def __init__(
        self,
        loss: Callable[..., Any],
        prepared: Container[int],
        plan: Plan,
        mesh: Mesh,
        *,
        nominal_count: float,
    ) -> None:
        """`prepared` are the identities of parameters of models, which have owners.  `nominal_count` is what a step
        divides the sum of its losses by before it knows their count.

        Raises:
            RecipeError: the loss holds other parameters on other ranks.
        """
        self._mesh, self._nominal_count = mesh, nominal_count
        self._held = [
            parameter
            for parameter in _reached(loss)
            if id(parameter) not in prepared and not isinstance(parameter, DTensor)
        ]
        # Ranks with other parts of the model compute other parts of the loss's gradient, which no one sum completes.
        data = plan.mesh.data == plan.mesh.world_size and not plan.data_parallel.replicas_step_alone
        # A loss that is no sum over samples is computed whole by every rank: there is no part of a sum.
        self._is_reduced = plan.mesh.world_size == 1 or (data and getattr(loss, "per_sample", True))
        self._before: Sequence[Tensor | None] | None = None
        self._is_first = mesh["world"].group is not None
        self._handles: list[RemovableHandle] = []
        self._refused: tuple[int, ...] | None = None
        """Shape of a parameter that had a gradient in this step, which nobody would sum."""
        group = mesh["world"].group
        shapes = ", ".join(f"{tuple(parameter.shape)} {parameter.dtype}" for parameter in self._held)
        check_same_facts({"what the loss holds that wants a gradient": shapes}, mesh.device, group)
        for each in self._held if group is not None and self._is_reduced else ():
            dist.broadcast(each.detach(), src=0, group=group)
        self._known, self._prepared = tuple(self._held), prepared

    def begin(self) -> None:
        """A step begins: gradients are its own from now on."""
        self._unhook()
        # Others are of models that were prepared since: a loss may name the other side of a game.
        self._held = [parameter for parameter in self._held if id(parameter) not in self._prepared]
        hooked = [parameter for parameter in self._known if id(parameter) not in self._prepared]
        self._handles = [parameter.register_post_accumulate_grad_hook(self._note) for parameter in hooked]
        if self._before is None or len(self._before) != len(self._held):  # else of a step that was left by an error
            self._before = [parameter.grad for parameter in self._held]
        for parameter in self._held:
            parameter.grad = None

    @torch.no_grad()
    def end(self, event: StepEvent) -> None:
        """A step has ended: sum what ranks have, and add it to what was there.

        Raises:
            RecipeError: a parameter had a gradient that nobody sums.
        """
        self._unhook()
        self._check()
        if not self._held or self._before is None:
            self._before = None
            return
        # Every rank must reduce the same tensors: a parameter that no rank used keeps the gradient that it had, one
        # that some used is summed with zeros of the others.
        used = torch.tensor([float(parameter.grad is not None) for parameter in self._held], device=self._mesh.device)
        kinds = dict.fromkeys(parameter.dtype for parameter in self._held)
        flats = [used, *(self._flat(kind) for kind in kinds)]
        if (group := self._mesh["world"].group) is not None and self._is_reduced:
            for flat in flats:
                dist.all_reduce(flat, group=group)
        # The backward divided each loss by the nominal count (and multiplied by the loss scale); the step's own count
        # is known only now.
        factor = self._nominal_count / ((event.count or 1.0) * event.loss_scale)
        sums = {kind: iter(flat.split(self._sizes(kind))) for kind, flat in zip(kinds, flats[1:], strict=True)}
        for parameter, before, users in zip(self._held, self._before, used.tolist(), strict=True):
            summed = next(sums[parameter.dtype]).view(parameter.shape).mul(factor).to(parameter.device)
            parameter.grad = before if not users else summed if before is None else before.add_(summed)
        self._before = None
        if self._is_first:  # the others are of modules that a loss only looks at
            self._held = [parameter for parameter, users in zip(self._held, used.tolist(), strict=True) if users]
            self._is_first = False

    def restore(self) -> None:
        """Look after them no more."""
        self._unhook()
        self._held, self._known = [], ()

    def _unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _sizes(self, kind: torch.dtype) -> list[int]:
        return [parameter.numel() for parameter in self._held if parameter.dtype == kind]

    def _flat(self, kind: torch.dtype) -> Tensor:
        gradients = [
            parameter if parameter.grad is None else parameter.grad
            for parameter in self._held
            if parameter.dtype == kind
        ]
        zeros = [parameter.grad is None for parameter in self._held if parameter.dtype == kind]
        flat = torch.cat([gradient.detach().reshape(-1).to(self._mesh.device) for gradient in gradients])
        for part, is_zero in zip(flat.split(self._sizes(kind)), zeros, strict=True):
            if is_zero:
                part.zero_()
        return flat

    def _note(self, parameter: Tensor) -> None:
        """Note a parameter that has just had a gradient in a step.

        Nothing is raised here: of a backward that a hook ends, autograd keeps the rest of the graph, and with it the
        process groups, for as long as the thread lives (torch 2.13).
        """
        if not self._is_reduced or all(each is not parameter for each in self._held):
            self._refused = tuple(parameter.shape)

    def _check(self) -> None:
        """Refuse what was noted in the step."""
        shape, self._refused = self._refused, None
        if shape is None:
            return
        if not self._is_reduced:
            raise RecipeError(
                f"the loss holds a parameter of shape {shape} that wants a gradient, and under this plan nobody would"
                " sum it over the ranks. Make the loss's module a submodule of the model, compute with it in the"
                " model's forward, and give its parameters to the optimizer that prepare takes."
            )
        raise RecipeError(
            f"a parameter of shape {shape} that the loss holds had its first gradient after the first step, when ranks"
            " had agreed on which they sum. Let all of the loss's parameters take part in the first step, or make its"
            " module a submodule of the model."
        )


def _reached(loss: Any) -> list[Tensor]:
    """Leaves that want a gradient and that a loss can reach: by its own attributes, its closure, its defaults, and the
    globals that it names."""
    parameters: dict[int, Tensor] = {}
    seen: set[int] = set()
    level = [loss]
    # Level by level, each object once: what a loss can reach may have cycles.
    for _ in range(_DEEPEST):
        inside: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                if value.requires_grad and value.is_leaf:
                    parameters[id(value)] = value
            else:
                inside += _inside(value)
        level = inside
    return list(parameters.values())


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from (var for module in value.modules() for var in vars(module).values() if isinstance(var, Tensor))
    elif isinstance(value, functools.partial):
        yield from (cast(Any, value.func), *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, Mapping):
        yield from cast(Mapping[Any, Any], value).values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from cast(Sequence[Any], value)
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType) and not _is_of_weft(value):
        yield from vars(value).values()


def _is_of_weft(value: object) -> bool:
    """Whether it is a session's: what that holds has an owner."""
    return type(value).__module__.partition(".")[0] == "weft" and not hasattr(value, "per_sample")


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not set yet
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
