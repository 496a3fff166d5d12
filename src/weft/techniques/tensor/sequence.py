"""Sequence parallelism: between its column- and row-parallel layers, each tensor rank keeps a shard of the sequence.

The activation is cut along dim 1 before the first block and whole again after the last norm; norms, dropouts and
residual sums in between work on shards and store 1/t of the activations.  The collectives at the column- and
row-parallel layers (`layers.py`) turn from all-reduces into all-gathers and reduce-scatters of the same volume.  Any
length is cut, also one that the group does not divide.  Source: Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import Plan
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.families import CutTable
from weft.techniques.core import ModelLayout, StepContext, is_own
from weft.techniques.core.autograd import gather_sequence, scatter_sequence
from weft.techniques.core.region import SequenceRegion, sequence_region
from weft.techniques.tensor.cuts import mark_partial


def apply_sequence(
    part: nn.Module, blueprint: Blueprint, plan: Plan, mesh: Mesh, context: StepContext, layout: ModelLayout
) -> None:
    """Install the borders of the sequence region in `part`, after `apply_tensor`.  Call it on every rank.

    A stage that is not the first receives shards; its stem runs on a stand-in of the whole length that takes no memory,
    so that a forward which reads lengths off the embedded tokens (positions, masks) sees the true one.  Parameters of
    modules that work on shards get partial gradients in `layout`.

    Raises:
        PlanError: no cut table, or a module among the blocks with parameters and no rule.
    """
    view = mesh["tensor"]
    if view.group is None or not plan.tensor_parallel.sequence:
        return
    region = sequence_region(blueprint)
    _Borders(part, blueprint, view, context).install(region)
    for name, module in part.named_modules():
        if region.contains(name) and is_own(part, blueprint, name):
            _place(name, module, blueprint, view, context, layout)


def _place(
    name: str, module: nn.Module, blueprint: Blueprint, view: GroupView, context: StepContext, layout: ModelLayout
) -> None:
    """Settle one module of the region: on shards, on the whole (replicated), or unknown."""
    own = [leaf for leaf, _ in module.named_parameters(recurse=False)]
    kind = blueprint.kind_of(name)
    if kind == "replicate" and blueprint.kind_of(name.rpartition(".")[0]) != "replicate":
        module.register_forward_pre_hook(partial(_enter_whole, view, context))
        module.register_forward_hook(partial(_leave_whole, view))
    elif kind == "sequence":
        for leaf in own:
            mark_partial(layout, f"{name}.{leaf}")
    elif kind is None and own:
        raise PlanError(
            f"plan.tensor_parallel.sequence = true, but no rule says whether {name}, a {type(module).__name__} with"
            f' parameters, works on a shard of the sequence. Add "{name}" = "sequence" (position by position, as norms'
            ' do) or "replicate" (on the whole) to [model.split], or use sequence = false.'
        )


def _enter_whole(view: GroupView, context: StepContext, module: nn.Module, args: Any) -> Any:
    return (gather_sequence(args[0], view, context.whole_length(), sum_grad=False), *args[1:])


def _leave_whole(view: GroupView, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return scatter_sequence(output, view)


@dataclass(slots=True)
class _Borders:
    """Cuts before the first block and joins after the region, where those modules are this part's own."""

    part: nn.Module
    blueprint: Blueprint
    view: GroupView
    context: StepContext
    received: Tensor | None = None
    """The activation that a later stage received, (samples, shard of the sequence, features), while its stem runs."""
    leaving: Tensor | None = None
    """The activation for the next stage, of the same form, while the rest of this stage's forward runs."""

    def install(self, region: SequenceRegion) -> None:
        assert isinstance(self.blueprint.cut, CutTable), "a region has a table"
        entry, first = self.blueprint.cut.entry, self.part.get_submodule(region.blocks[0])
        if is_own(self.part, self.blueprint, entry):
            first.register_forward_pre_hook(self._cut, with_kwargs=True, prepend=True)
        else:
            self.part.get_submodule(entry).register_forward_hook(self._set_aside)
            first.register_forward_pre_hook(self._take_up, with_kwargs=True, prepend=True)
        if is_own(self.part, self.blueprint, region.last):
            self.part.get_submodule(region.last).register_forward_hook(self._join)
            return
        mine = [name for name in region.blocks if is_own(self.part, self.blueprint, name)]
        self.part.get_submodule(mine[-1]).register_forward_hook(self._put_by)
        self.part.register_forward_hook(self._hand_over)

    def _cut(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = _first_argument(args, kwargs)
        length = hidden.shape[1]
        state = self.context.current
        if state is not None and state.sequence_length != length:
            raise PlanError(
                f"plan.tensor_parallel.sequence = true, but the first block receives {tuple(hidden.shape)}"
                f" while samples are"
                f" {state.sequence_length} tokens long: dim 1 is not the sequence of the batch. Use sequence = false."
            )
        self.context.cut_length = length  # gathers need the full length, which shards of unequal length do not tell
        return _with_first(args, kwargs, scatter_sequence(hidden, self.view))

    def _set_aside(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.received = output
        # One element expanded to (samples, full length, features): the stem reads its shape, and it takes no memory.
        batch, _, *features = output.shape
        shape = (batch, self.context.whole_length(), *features)
        return output.new_zeros(()).expand(shape)

    def _take_up(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        received, self.received = self.received, None
        assert received is not None, "the first block of a later stage ran before its stem"
        return _with_first(args, kwargs, received)

    def _put_by(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Let the rest of the stage's forward see the full length too: some forwards reshape by it at the end."""
        leaving: Tensor
        leaving, *others = output if isinstance(output, tuple) else (output,)
        self.leaving = leaving
        batch, _, *features = leaving.shape
        whole = leaving.new_zeros(()).expand(batch, self.context.whole_length(), *features)
        return (whole, *others) if isinstance(output, tuple) else whole

    def _hand_over(self, module: nn.Module, args: Any, output: Any) -> Tensor:
        leaving, self.leaving = self.leaving, None
        assert leaving is not None, "a stage ended before its last block ran"
        return leaving

    def _join(self, module: nn.Module, args: Any, output: Any) -> Any:
        hidden, *others = output if isinstance(output, tuple) else (output,)
        whole = gather_sequence(hidden, self.view, self.context.whole_length(), sum_grad=False)
        return (whole, *others) if isinstance(output, tuple) else whole


def _first_argument(args: Any, kwargs: Any) -> Tensor:
    return args[0] if args else next(iter(kwargs.values()))


def _with_first(args: Any, kwargs: Any, hidden: Tensor) -> Any:
    """A block's arguments with another activation in place of its first."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): hidden})
