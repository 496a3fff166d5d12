"""The user's own torch optimizer, made to update this rank's shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from weft.api.guards.edits import OptimizerTensor
from weft.api.guards.model_guard import Guard
from weft.api.guards.state_checks import is_due
from weft.api.ranks.json_values import tensors_in
from weft.api.saving.optimizer_states import RankStates, StateRun, keys_of, own_attributes
from weft.errors import PlanError, RecipeError
from weft.run.engine.optimizers import ShardOptimizer
from weft.techniques.core import CheckpointShard, Segment, Shard

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
    for attribute, value in own_attributes(optimizer).items():
        if any(id(each) in names for each in tensors_in(value)):
            raise RecipeError(
                f"the {type(optimizer).__name__} keeps parameters in its attribute {attribute}, and under a plan it"
                " updates others: this rank's share, which param_groups hold. Let its step take them from there."
            )
    groups: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise RecipeError(
                    f"parameter group {index} of the {type(optimizer).__name__} holds a tensor of shape"
                    f" {tuple(parameter.shape)} that is no parameter of the model. Create the optimizer over"
                    " model.parameters() of the same model, after moving or changing it. What belongs to the loss, make"
                    " a submodule of the model, or give it to an optimizer of its own."
                )
            groups[names[id(parameter)]] = index
    left = [name for name, parameter in module.named_parameters() if parameter.requires_grad and name not in groups]
    if left:
        raise RecipeError(
            f"{len(left)} trainable parameters ({', '.join(left[:3])}) are in none of the optimizer's groups, so"
            " they would never change. Add them, or freeze them with requires_grad_(False)."
        )
    if any(isinstance(key, Tensor) for key in keys_of(optimizer)):
        raise RecipeError(
            "the optimizer has taken steps already; its states belong to whole parameters and cannot be cut. Prepare it"
            " fresh, and go on with a saved run by state.load()."
        )
    return groups


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return every setting of the parameter groups by its name: what must be equal on all ranks before each step."""
    kind = type(optimizer).__name__
    return {
        f"{kind}'s {name} (group {index})": str(value.tolist() if isinstance(value, Tensor) else value)
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

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        shards: Sequence[Shard],
        *,
        order: Sequence[str],
        whole: bool,
        guard: Guard,
    ) -> None:
        """`order`: names of the parameters as the optimizer has them.  `whole`: hand every one over in its own shape
        (for optimizers that are not elementwise)."""
        super().__init__(shards, [])
        for name in (shard.segments[0].layout.name for shard in shards if shard.sparse):
            raise RecipeError(
                f"{name} belongs to an nn.Embedding with sparse=True, whose gradient is rows and not a tensor that a"
                " torch optimizer over shards can take. Build the embedding with sparse=False, or train by"
                " `weft train`, whose optimizer.sparse_rule updates such tables."
            )
        self._optimizer = optimizer
        self._guard = guard
        self._runs: list[StateRun] = []
        for shard in shards:
            for segment in shard.segments:
                view = shard.master[segment.offset : segment.offset + segment.length]
                if whole:
                    _require_unsharded(segment, type(optimizer).__name__)
                if whole or not segment.local_shape:  # a state of such a parameter is told from a count by its shape
                    view = view.view(segment.local_shape)
                self._runs.append(StateRun(shard, segment, view))
        place = {name: index for index, name in enumerate(order)}
        self._runs.sort(key=lambda run: (place[run.name], run.segment.start))  # as the optimizer had its parameters
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [run.view for run in self._runs if run.shard.group == index]
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._storages = self._find_storages()
        self._num_steps = 0
        self._places: list[int] = []
        """Places of the shards' gradients of which the runs' `grad` are parts for good; empty: these are made anew each
        step."""
        self._given: list[Tensor | None] = []
        """Parts of the shards' gradients that the runs have as `grad`."""
        self.kept = RankStates(optimizer, self._runs)
        """The optimizer's states on this rank, for checkpoints."""
        guard.watch_optimizer(optimizer)

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: float = 1.0, skipped: Collection[str] = ()) -> None:
        """See `ShardOptimizer.step`; `learning_rate` is not looked at, the optimizer has its own."""
        del learning_rate
        self._refuse_new_parameters()
        self._num_steps += 1
        if is_due(self._num_steps):  # each look takes 11 µs for 148 tensors
            self._refuse_other_storage()
        for shard in self._shards if gradient_scale != 1.0 else ():
            if shard.gradient is not None and shard.gradient.dtype == shard.master.dtype:
                shard.gradient.mul_(gradient_scale)
        places = [shard.gradient.data_ptr() for shard in self._shards if shard.gradient is not None]
        if skipped or places != self._places:
            self._give_gradients(gradient_scale, skipped)
        else:
            for run, gradient in zip(self._runs, self._given, strict=True):
                if run.view.grad is not gradient:  # the loop's own optimizer.zero_grad() has taken it away
                    run.view.grad = gradient
        with self._guard.inside():
            self._optimizer.step()
        if not skipped and all(shard.keeps_gradient for shard in self._shards):
            self._places, self._given = places, [run.view.grad for run in self._runs]
        else:
            self._places, self._given = [], []
            for _, _, view in self._runs:
                view.grad = None

    def _give_gradients(self, scale: float, skipped: Collection[str]) -> None:
        """Set every run's `grad` to its part of the shard's gradient, which may be where it was in the last step."""
        for shard, segment, view in self._runs:
            assert shard.gradient is not None
            if segment.layout.name in skipped:
                view.grad = None  # as plain torch leaves it: untouched, states and all
                continue
            gradient = shard.gradient[segment.offset : segment.offset + segment.length].view(view.shape)
            is_scaled = gradient.dtype == view.dtype
            view.grad = gradient if is_scaled else gradient.to(view.dtype).mul_(scale)

    @property
    def runs(self) -> Sequence[StateRun]:
        """The runs that this rank updates, in the optimizer's order."""
        return self._runs

    @property
    def held(self) -> Sequence[OptimizerTensor]:
        """What the optimizer's parameter groups hold, for who watches what a loop does with it."""
        return [
            OptimizerTensor(run.name, run.view, run.segment.layout, run.shard.cut_group is not None)
            for run in self._runs
        ]

    def _refuse_new_parameters(self) -> None:
        if [len(group["params"]) for group in self._optimizer.param_groups] != self._sizes:
            raise RecipeError(
                f"the {type(self._optimizer).__name__} was given further parameters after session.prepare, which would"
                " not be reduced between ranks. Add them before prepare, with requires_grad as it is to be."
            )

    def _find_storages(self) -> list[int]:
        return [run.view.untyped_storage()._cdata for run in self._runs]  # pyright: ignore[reportPrivateUsage]

    def _refuse_other_storage(self) -> None:
        """What is given another tensor is no part of the weights any more: those would not train on."""
        for run, known, storage in zip(self._runs, self._storages, self._find_storages(), strict=True):
            if known != storage:
                raise RecipeError(
                    f"the loop has given what the {type(self._optimizer).__name__}'s param_groups hold of"
                    f" {run.name} another tensor (`.data = …`), which the model's weights do not follow. Write into it:"
                    " `with torch.no_grad(): p.copy_(new)`."
                )

    def state_bytes(self) -> int:
        """Bytes of the optimizer's states on this rank."""
        states = [value for run in self._runs for value in self._optimizer.state.get(run.view, {}).values()]
        return sum(value.numel() * value.element_size() for value in states if isinstance(value, Tensor))

    def _iterate_shards(self) -> Iterator[CheckpointShard]:
        yield from self.kept.checkpoint_shards()


def _require_unsharded(segment: Segment, name: str) -> None:
    if not segment.is_whole or segment.layout.split:
        raise PlanError(
            f"{name} may look at whole parameters, but this plan cuts {segment.layout.name}. Use data_parallel.zero"
            " = 0, 1 or 2 and mesh.tensor = 1, or an elementwise optimizer of torch.optim."
        )
