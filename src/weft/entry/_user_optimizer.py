"""The user's own torch optimizer, made to update this rank's shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.document import JsonObject
from weft.engine.optimizers import ShardOptimizer
from weft.entry._guards import Guard
from weft.errors import PlanError, RecipeError
from weft.parallel import NestedSplit, Piece, Segment, Shard

_ELEMENTWISE = ("Adam", "AdamW", "SGD", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")
"""Classes of torch.optim whose update of an element looks at that element alone, so that shards may be cut anywhere."""


def cuts_of(optimizer: torch.optim.Optimizer) -> str:
    """`anywhere` for torch's own elementwise optimizers; others may look at whole tensors and get them whole."""
    kind = type(optimizer)
    return "anywhere" if kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE else "parameter"


def group_indices(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, int]:
    """Return each trainable parameter's index of parameter group, by its first name in the module.

    Raises:
        RecipeError: the optimizer has another model's parameters, lacks some, or has taken steps already.
    """
    reasons = {
        "LBFGS": "evaluates the loss several times per step, by a closure",
        "Adagrad": "makes its states for whole parameters when it is created",
    }
    if (reason := reasons.get(type(optimizer).__name__)) is not None:
        raise RecipeError(
            f"{type(optimizer).__name__} {reason}, which a session cannot cut or repeat."
            f" Use one of {', '.join(_ELEMENTWISE)}."
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise RecipeError(
                    f"parameter group {index} of the {type(optimizer).__name__} holds a tensor of shape"
                    f" {tuple(parameter.shape)} that is no parameter of the model. Create the optimizer over"
                    " model.parameters() of the same model, after moving or changing it."
                )
            groups[names[id(parameter)]] = index
    left = [name for name, parameter in module.named_parameters() if parameter.requires_grad and name not in groups]
    if left:
        raise RecipeError(
            f"{len(left)} trainable parameters ({', '.join(left[:3])}) are in none of the optimizer's groups, so"
            " they would never change. Add them, or freeze them with requires_grad_(False)."
        )
    if optimizer.state:
        raise RecipeError(
            "the optimizer has taken steps already; its states belong to whole parameters and cannot be cut. Prepare it"
            " fresh, and go on with a saved run by state.load()."
        )
    return groups


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return every setting of the parameter groups by its name: what must be equal on all ranks before each step."""
    kind = type(optimizer).__name__
    return {
        f"{kind}'s {name} (group {index})": str(float(value) if isinstance(value, Tensor) else value)
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params" and not callable(value)
    }


class UserOptimizer(ShardOptimizer):
    """Steps a torch optimizer over views of the shards, one view per parameter and rank.

    The optimizer stays the user's object: its settings are read at every step, so schedulers act on it as ever.  Its
    parameter groups hold this rank's views from now on.
    """

    counts_steps = False

    def __init__(self, optimizer: torch.optim.Optimizer, shards: Sequence[Shard], *, whole: bool, guard: Guard) -> None:
        """`whole`: hand every parameter over in its own shape (for optimizers that are not elementwise)."""
        super().__init__(shards, [])
        for name in (shard.segments[0].layout.name for shard in shards if shard.sparse):
            raise RecipeError(
                f"{name} belongs to an nn.Embedding with sparse=True, whose gradient is rows and not a tensor that a"
                " torch optimizer over shards can take. Build the embedding with sparse=False, or train from a"
                " recipe, where optimizer.sparse_rule updates such tables."
            )
        self._optimizer = optimizer
        self._guard = guard
        self._runs: list[tuple[Shard, Segment, Tensor]] = []
        groups: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for shard in shards:
            for segment in shard.segments:
                view = shard.master[segment.offset : segment.offset + segment.length]
                if whole:
                    _require_whole(segment, type(optimizer).__name__)
                    view = view.view(segment.local_shape)
                self._runs.append((shard, segment, view))
                groups[shard.group].append(view)
        for group, views in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = views
        self._sizes = [len(views) for views in groups]
        guard.watch_optimizer(optimizer)

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: float = 1.0, skipped: Collection[str] = ()) -> None:
        """See `ShardOptimizer.step`; `learning_rate` is not looked at, the optimizer has its own."""
        del learning_rate
        self._refuse_new_parameters()
        for shard, segment, view in self._runs:
            assert shard.gradient is not None
            if segment.layout.name in skipped:
                view.grad = None  # as plain torch leaves it: untouched, states and all
                continue
            gradient = shard.gradient[segment.offset : segment.offset + segment.length].view(view.shape)
            view.grad = gradient.to(view.dtype).mul_(gradient_scale)
        with self._guard.inside():
            self._optimizer.step()
        for _, _, view in self._runs:
            view.grad = None

    @torch.no_grad()
    def create_states(self) -> None:
        """Let the optimizer make the states that it has not yet, which torch does with the first step of a parameter,
        without changing a weight; they then say that no step was taken, so that nothing else differs from before."""
        missing = [view for _, _, view in self._runs if not self._optimizer.state.get(view)]
        rates = [group["lr"] for group in self._optimizer.param_groups]
        before = [view.clone() for view in missing]
        for group in self._optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for view in missing:
            view.grad = torch.zeros_like(view)
        with self._guard.inside():
            self._optimizer.step()
        for view, kept in zip(missing, before, strict=True):
            view.grad = None
            view.copy_(kept)
            for name, value in self._optimizer.state.get(view, {}).items():
                if isinstance(value, Tensor):
                    value.fill_(1.0 if name == "mu_product" else 0.0)  # NAdam's running product starts at one
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _refuse_new_parameters(self) -> None:
        if [len(group["params"]) for group in self._optimizer.param_groups] != self._sizes:
            raise RecipeError(
                f"the {type(self._optimizer).__name__} was given further parameters after session.prepare, which would"
                " not be reduced between ranks. Add them before prepare, with requires_grad as it is to be."
            )

    def settings(self) -> list[dict[str, Any]]:
        """JSON values of the parameter groups (rates that schedulers have changed), for a checkpoint."""
        return [
            {name: value for name, value in group.items() if isinstance(value, int | float | bool | str)}
            for group in self._optimizer.param_groups
        ]

    def check_settings(self, state: JsonObject) -> None:
        """Refuse settings (`optimizer` of a checkpoint's state) that `settings` of these groups cannot have returned.

        Raises:
            CheckpointError: names file and group.
        """
        groups, own = list(state.objects("optimizer")), self.settings()
        if len(groups) != len(own):
            raise state.fail("optimizer", f"a list of {len(own)} parameter groups, as the optimizer has")
        for group, mine in zip(groups, own, strict=True):
            for name, value in group.values.items():
                if name not in mine or isinstance(value, bool) != isinstance(mine[name], bool):
                    raise group.fail(name, "a setting of the optimizer's group")
                if isinstance(value, bool):
                    continue
                if isinstance(value, int | float) and isinstance(mine[name], int | float):
                    group.number(name, least=-1e30, most=1e30)
                elif type(value) is not type(mine[name]):
                    raise group.fail(name, f"a {type(mine[name]).__name__}")

    def load_settings(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Put back what `settings` returned."""
        for group, values in zip(self._optimizer.param_groups, saved, strict=True):
            group.update(values)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's states on this rank."""
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        return sum(value.numel() * value.element_size() for value in states if isinstance(value, Tensor))

    def _iterate_pieces(self) -> Iterator[Piece]:
        for shard, segment, view in self._runs:
            for key, value in self._optimizer.state.get(view, {}).items():
                if not isinstance(value, Tensor):
                    raise PlanError(
                        f"the state {key!r} of {type(self._optimizer).__name__} is a {type(value).__name__}, which a"
                        " checkpoint cannot hold. Use an optimizer whose states are tensors."
                    )
                elementwise = value.shape == view.shape
                layout = segment.layout
                if not elementwise and value.numel() != 1:
                    raise PlanError(
                        f"the state {key!r} of {type(self._optimizer).__name__} has shape {tuple(value.shape)} for a"
                        " parameter of"
                        f" shape {tuple(view.shape)}, so it cannot be saved. Use one of {', '.join(_ELEMENTWISE)}."
                    )
                yield Piece(
                    name=f"optimizer/{key}/{layout.name}",
                    shape=layout.shape if elementwise else torch.Size(),
                    tensor=value.view(-1),
                    split=layout.split if elementwise else NestedSplit(),
                    start=segment.start if elementwise else 0,
                    counts=shard.counts and (elementwise or _holds_first(segment)),
                )


def _holds_first(segment: Segment) -> bool:
    """Whether the first element of the whole parameter lies in this run: one rank's does, and it writes the scalars."""
    return segment.start == 0 and segment.layout.split.index == 0


def _require_whole(segment: Segment, name: str) -> None:
    if not segment.is_whole or segment.layout.split:
        raise PlanError(
            f"{name} may look at whole parameters, but this plan cuts {segment.layout.name}. Use data_parallel.zero"
            " = 0, 1 or 2 and mesh.tensor = 1, or an elementwise optimizer of torch.optim."
        )
