"""Expert parallelism on a rank: it keeps some experts of every mixture, to which the tokens of all ranks travel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn

from weft.comm.mesh import GroupView
from weft.errors import PlanError
from weft.model.reference.mixture import Experts, Mixture
from weft.techniques.core import MicrobatchState, ModelPart, Split, StepContext
from weft.techniques.expert.exchange import AllToAllDispatcher
from weft.techniques.expert.journey import Dispatcher
from weft.techniques.runtime import Build, TechniqueRuntime
from weft.techniques.tensor.cuts import cut_parameters

if TYPE_CHECKING:
    from weft.model.stacked import ExpertStack


@final
class ExpertRanks(TechniqueRuntime):
    """This rank's experts: those of rank r of e are the r-th of e equal runs."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._arrivals = _Arrivals(build.context)

    def split(self, part: ModelPart) -> None:
        blueprint = self._build.blueprint
        if not blueprint.experts:
            why = (
                blueprint.why_not("expert")
                or "this model has no mixture of experts (weft.model.reference.mixture.Mixture)"
            )
            raise PlanError(
                f"plan.mesh.expert = {self._build.plan.mesh.expert} shares out experts, but {why}."
                " Use plan.mesh.expert = 1."
            )
        view = self._build.mesh["expert"]
        for name, module in part.module.named_modules():
            if isinstance(module, Mixture):
                experts, name = module.experts, f"{name}.experts" if name else "experts"
                dispatcher = self._dispatcher(name, experts, experts.num_experts)
                self._share_out(part, name, experts, experts.num_experts, view)
                module.dispatch = _Dispatch(dispatcher, experts)  # pyright: ignore[reportAttributeAccessIssue]
            elif stack := blueprint.stacks.get(name):
                dispatcher = self._dispatcher(name, module, stack.num_experts)
                self._share_out(part, name, module, stack.num_experts, view)
                module.forward = _StackDispatch(dispatcher, module, stack)

    def _dispatcher(self, name: str, experts: nn.Module, num_experts: int) -> Dispatcher:
        build = self._build
        view, context = build.mesh["expert"], build.context
        if build.plan.expert_parallel.exchange == "all_gather":
            from weft.techniques.expert.gathered import AllGatherDispatcher  # loaded where tokens travel so

            return AllGatherDispatcher(view, num_experts, context, build.plan.mesh)

        def note(rows: int) -> None:
            if experts.training:
                self._arrivals.note(name, rows)

        return AllToAllDispatcher(view, num_experts, note)

    def _share_out(self, part: ModelPart, name: str, experts: nn.Module, num_experts: int, view: GroupView) -> None:
        if num_experts % view.size:
            raise PlanError(
                f"plan.mesh.expert = {view.size} does not divide the {num_experts} experts of {name}."
                " Use a divisor of them."
            )
        cut = Split(dim=0, parts=view.size, index=view.index)
        names = [f"{name}.{leaf}" for leaf, _ in experts.named_parameters()]
        for one in names:
            entry = part.layout[one]
            part.layout.entries[one] = replace(entry, placements={**entry.placements, "expert": cut})
        cut_parameters(part.module, dict.fromkeys(names, cut))

    def take_rows(self) -> list[tuple[str, int, int]]:
        return self._arrivals.take()


class _Arrivals:
    """How many rows came to each mixture's experts in training: what only data decide."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._seen: dict[str, dict[int, tuple[MicrobatchState, int]]] = {}

    def note(self, name: str, rows: int) -> None:
        """Note a forward of the microbatch in hand, once however often it runs."""
        state = self._context.current
        if state is not None:
            self._seen.setdefault(name, {})[id(state)] = (state, rows)

    def take(self) -> list[tuple[str, int, int]]:
        """Return (name, number of the microbatch, rows) since this was asked last."""
        seen, self._seen = self._seen, {}
        return [
            (name, number, rows)
            for name, by_state in seen.items()
            for number, (_, rows) in enumerate(by_state.values())
        ]


@final
class _Dispatch:
    """Stands for `Mixture.dispatch`."""

    def __init__(self, dispatcher: Dispatcher, experts: Experts) -> None:
        self._dispatcher, self._experts = dispatcher, experts

    def __call__(
        self, tokens: Tensor, chosen: Tensor, weights: Tensor, meanwhile: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """See `Mixture.dispatch`.  Call on every rank that shares the experts out, forward and backward."""
        return self._dispatcher.mix(tokens, chosen, weights, self._experts, meanwhile)


@final
class _StackDispatch:
    """Stands for the forward of a module of stacked experts of transformers, of which it holds this rank's."""

    def __init__(self, dispatcher: Dispatcher, experts: nn.Module, stack: ExpertStack) -> None:
        self._dispatcher, self._experts, self._stack = dispatcher, experts, stack

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what each token's choices make of it.  Call on every rank that shares the experts out, forward and
        backward."""
        tokens, choices, weights = self._stack.operands(args, kwargs)
        compute = partial(self._stack.run, self._experts)
        mixed, _ = self._dispatcher.mix(tokens, choices, weights, compute, lambda: None)
        return mixed


def create(build: Build) -> TechniqueRuntime:
    """See `weft.techniques.runtime`."""
    return ExpertRanks(build)
