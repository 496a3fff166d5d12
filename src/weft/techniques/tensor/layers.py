"""Tensor parallelism, 1-D: linear layers and embeddings cut over the tensor group.

Parameters become plain local tensors and the user's modules run unchanged on them; hooks before and after carry the
collectives.  A column-parallel layer computes its share of the features from the whole input, a row-parallel one its
share of the sum over the features, so a pair costs one all-reduce forward and one backward.  Source: Shoeybi et al.
2019, https://arxiv.org/abs/1909.08053; with sequence parallelism Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import Plan
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.families import SplitRule
from weft.model.plain_layers import is_conv1d, is_linear, localise
from weft.techniques.core import ModelLayout, Split, StepContext, fill_layout, first_names, is_own
from weft.techniques.core.autograd import (
    copy_to_group,
    gather_features,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
)
from weft.techniques.core.region import sequence_region
from weft.techniques.tensor.cuts import (
    check_sizes,
    check_ties,
    cut_parameters,
    is_coded,
    is_magnitude,
    mark_partial,
    split_parameters,
)

Forward = Callable[..., Any]


def apply_tensor(
    part: nn.Module, blueprint: Blueprint, plan: Plan, mesh: Mesh, context: StepContext, layout: ModelLayout
) -> None:
    """Cut `part` in place by the blueprint's split rules and enter all its parameters and buffers in `layout`.

    Call it on every rank, before anything else that installs hooks.  `part` may be on meta (parameters become meta
    tensors of local shape; the layout keeps the whole shape) or hold real, equal data on all ranks, which is sliced.
    Modules without a rule are replicated and computed alike by every rank of the group.  A module that rules mark
    `heads` or `features` works on split activations, so its own parameters get partial gradients.  Attributes such as
    `nn.Linear.out_features` go on describing the whole layer, which initialisers read.

    Raises:
        PlanError: no split table, sizes that do not divide, ties cut differently, a rule that does not fit its module.
    """
    view = mesh["tensor"]
    whole = blueprint.module
    names = first_names(part) | first_names(whole)
    if view.group is None:
        fill_layout(layout, part, names, {})
        return
    _check_table(blueprint, view)
    splits = split_parameters(blueprint, view)
    check_ties(names, splits, blueprint)
    # The layout keeps full shapes, and hooks look at full modules; only then are parameters cut.
    fill_layout(layout, part, names, splits)
    _Splitter(part, blueprint, plan, view, context, layout).install(splits)
    cut_parameters(part, splits)
    localise(part, blueprint, view.size)


def _check_table(blueprint: Blueprint, view: GroupView) -> None:
    if not blueprint.splits:
        raise PlanError(
            f"plan.mesh.tensor = {view.size}, but nothing says how {type(blueprint.module).__name__} splits: it"
            f" gets data and"
            " ZeRO plans only. Write its table under [model.split], or use plan.mesh.tensor = 1."
        )
    if reason := blueprint.why_not("tensor"):
        raise PlanError(
            f"plan.mesh.tensor = {view.size} cannot be had: {reason}. Mend the table, or use plan.mesh.tensor = 1."
        )
    check_sizes(blueprint, view.size)
    if any(rule.kind in ("channel_out", "channel_in") for rule in blueprint.split):
        from weft.techniques.tensor.channels import check_bare  # loaded where convolutions are split

        check_bare(blueprint)


@dataclass(slots=True)
class _SharedInput:
    """The copied (or gathered) input of the columns that read one tensor (query, key, value; gate, up).

    Autograd then sums their gradients before the one collective of the backward, instead of three.  The slot is emptied
    by the next row-parallel layer, so that it does not keep activations alive.
    """

    source: Tensor | None = None
    version: int = -1
    result: Tensor | None = None

    def get(self, x: Tensor, make: Callable[[Tensor], Tensor], *, kept: bool) -> Tensor:
        """Return what was made of `x` for an earlier reader, or make it.  `kept`: the reader's backward needs `x`."""
        version = _version(x, kept)
        if version is None:  # nothing would tell of a change in place, so nothing is shared
            return make(x)
        wants_grad = torch.is_grad_enabled() and x.requires_grad
        # Identity and version of `x`, and whether the copy has a gradient: a forward without gradients (evaluation)
        # must not hand its result to one with them.
        result = self.result
        fresh = result is None or self.source is not x or self.version != version or result.requires_grad != wants_grad
        if result is None or fresh:
            result = make(x)
            self.source, self.version, self.result = x, version, result
        return result

    def clear(self) -> None:
        self.source = self.result = None


def _version(x: Tensor, kept: bool) -> int | None:
    """Return a number that changes with `x`; None: nothing tells of a change.

    Compiled code has no versions to compare (a graph would end here).  There `x` is as it was where a backward needs
    it, because autograd would refuse to run it otherwise.
    """
    if torch.compiler.is_compiling():
        return 0 if kept else None
    return None if x.is_inference() else x._version


@dataclass(slots=True)
class _Splitter:
    """Installs the hooks of one part."""

    part: nn.Module
    blueprint: Blueprint
    plan: Plan
    view: GroupView
    context: StepContext
    layout: ModelLayout
    shared: _SharedInput = field(default_factory=_SharedInput)

    def install(self, splits: dict[str, Split]) -> None:
        sequence = self.plan.tensor_parallel.sequence
        region = sequence_region(self.blueprint) if sequence else None
        # Inside of the region a column gathers shards of the sequence where it would copy, and a row reduce-scatters
        # where it would all-reduce: as many bytes, and 1/t of the activations between (Korthikanti et al. 2022, §4.2).
        done: set[int] = set()
        wholes: list[str] = []
        for name, module in self.part.named_modules(remove_duplicate=False):
            rule = self.blueprint.rule_of(name)
            if rule is None or id(module) in done or not is_own(self.part, self.blueprint, name):
                continue
            done.add(id(module))
            inside = region is not None and region.contains(name)
            match rule.kind:
                case "column" | "row" if is_magnitude(module):
                    self._magnitudes(module, rule.kind)
                case "column" | "channel_out":
                    self._column(name, module, rule, inside, gathered=name.startswith(tuple(wholes)))
                case "row":
                    self._row(name, module, inside)
                case "channel_in" | "channels":
                    from weft.techniques.tensor import channels  # loaded where convolutions are split

                    if rule.kind == "channels":
                        channels.share_channels(module, self.view)
                    else:
                        channels.sum_channels(module, partial(reduce_from_group, view=self.view), self.shared.clear)
                case "vocab":
                    _vocabulary_embedding(name, module, self.view)
                case "gathered_input" if inside:
                    wholes.append(name + ".")
                    module.register_forward_pre_hook(
                        partial(_share_input, self.shared, self._gathered), with_kwargs=True
                    )
                case "heads" | "features":
                    # Parameters that work on split activations are whole on every rank and see a part of the gradient.
                    for leaf, _ in module.named_parameters(recurse=False):
                        mark_partial(self.layout, f"{name}.{leaf}")
                case "gather":
                    self._gather(name, module)
                case "expert" if rule.match == name or fnmatchcase(name, rule.match):
                    from weft.techniques.tensor.mixtures import share_mixture  # loaded where there are mixtures

                    enter = self._gathered if inside else self._copied
                    leave = partial(reduce_scatter_sequence if inside else reduce_from_group, view=self.view)
                    share_mixture(name, module, self.view, enter, leave)
                    self.shared.clear()
                case _:
                    pass
        for name, _ in self.part.named_parameters(remove_duplicate=False):
            own = self.blueprint.rule_of_parameter(name)
            if own is not None and own.kind == "heads":
                mark_partial(self.layout, name)

    def _column(self, name: str, module: nn.Module, rule: SplitRule, inside: bool, *, gathered: bool) -> None:
        if inside and rule.kind == "channel_out":
            raise PlanError(
                f"plan.tensor_parallel.sequence = true, but {name} is a convolution, which a shard of the sequence is"
                " not enough for. Use sequence = false."
            )
        is_head = rule.gather_output or name == self.blueprint.vocabulary_head
        if not gathered:
            before = self._gathered if inside else self._copied
            shared = None if is_head else self.shared  # no row-parallel layer comes after a head to empty the slot
            module.register_forward_pre_hook(partial(_share_input, shared, before), with_kwargs=True)
        if is_conv1d(module):
            width: Any = module.nf  # transformers' Conv1D reads its output width from here
            object.__setattr__(module, "nf", width // self.view.size)
        if rule.gather_output and name != self.blueprint.vocabulary_head:
            gather = partial(_gather_output, self.view, rule.blocks)
            module.register_forward_hook(gather, prepend=True)  # before hooks of the user's

    def _magnitudes(self, module: nn.Module, kind: str) -> None:
        from weft.techniques.tensor import magnitudes  # loaded where DoRA is

        reduce = partial(reduce_from_group, view=self.view)
        module.forward = (
            magnitudes.column_magnitudes(module, self._copied)
            if kind == "column"
            else magnitudes.row_magnitudes(module, reduce, reduce)
        )

    def _gather(self, name: str, module: nn.Module) -> None:
        """Each rank computes the whole result and goes on with its part, so it has a part of every gradient."""
        module.register_forward_pre_hook(partial(_enter_gathered, self.view))
        module.register_forward_hook(partial(_leave_gathered, self.view))
        for leaf, _ in module.named_parameters(recurse=False):
            mark_partial(self.layout, f"{name}.{leaf}")

    def _copied(self, x: Tensor) -> Tensor:
        return copy_to_group(x, self.view) if torch.is_grad_enabled() and x.requires_grad else x

    def _gathered(self, x: Tensor) -> Tensor:
        return gather_sequence(x, self.view, self.context.whole_length(), sum_grad=True)

    def _row(self, name: str, module: nn.Module, inside: bool) -> None:
        reduce = partial(reduce_scatter_sequence if inside else reduce_from_group, view=self.view)
        # The bias must be added once, after the sum over the group: a plain layer gets a forward that does so, a layer
        # without bias a hook.  Any other forward could use its bias in its own way, and is refused.
        is_given = "forward" in vars(module)
        plain = not is_given and (type(module).forward is nn.Linear.forward or type(module).__name__ == "Conv1D")
        if plain or is_coded(module):
            product = _linear_product if is_linear(module) else _conv1d_product
            module.forward = _row_forward(module, product, reduce, self.shared)
        elif not is_given and getattr(module, "bias", None) is None:
            module.register_forward_hook(partial(_reduce_output, reduce, self.shared))
        elif is_given:
            raise PlanError(
                f"{name} was given a forward of its own, which would run on a part of its input if it were split"
                ' row-wise. Let the forward of the model do what it does, or use the kind "replicate".'
            )
        else:
            raise PlanError(
                f"{name} is a {type(module).__name__} with a bias and a forward of its own: split row-wise, its"
                f" bias would be"
                f' added {self.view.size} times. Use a plain nn.Linear, bias=False, or the kind "replicate".'
            )
        if inside and getattr(module, "bias", None) is not None:
            # Added to a shard of the sequence, so its gradient misses the tokens of the other ranks.
            mark_partial(self.layout, f"{name}.bias")


def _share_input(
    shared: _SharedInput | None, make: Callable[[Tensor], Tensor], module: nn.Module, args: Any, kwargs: Any
) -> Any:
    weight = None if is_coded(module) else getattr(module, "weight", None)
    kept = weight is not None and weight.requires_grad

    def get(x: Tensor) -> Tensor:
        return make(x) if shared is None else shared.get(x, make, kept=kept)

    if args:
        return (get(args[0]), *args[1:]), kwargs
    key = next(iter(kwargs))
    return args, {**kwargs, key: get(kwargs[key])}


def _enter_gathered(view: GroupView, module: nn.Module, args: Any) -> Any:
    whole = gather_features(args[0], view)
    return (copy_to_group(whole, view) if whole.requires_grad else whole, *args[1:])


def _leave_gathered(view: GroupView, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.chunk(view.size, -1)[view.index].contiguous()


def _gather_output(view: GroupView, blocks: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return gather_features(output, view, blocks)


def _row_forward(
    module: nn.Module,
    product: Callable[[nn.Module, Tensor], Tensor],
    reduce: Callable[[Tensor], Tensor],
    shared: _SharedInput,
) -> Callable[[Tensor], Tensor]:
    """The layer's own forward, with the bias added once, after the sum over the group.

    A function and no partial: compiled code would ask whether that is the very same one, so that every block were
    compiled for itself, up to torch's limit of eight, and the others run eagerly.
    """

    def forward(input: Tensor) -> Tensor:
        shared.clear()
        output = reduce(product(module, input))
        bias = getattr(module, "bias", None)
        return output if bias is None else output + bias

    return forward


def _linear_product(module: nn.Module, x: Tensor) -> Tensor:
    if is_coded(module):
        return module.product(x)  # pyright: ignore[reportCallIssue]
    weight = cast(Tensor, module.weight)
    _check_width(x.shape[-1], weight.shape[1])
    return F.linear(x, weight)


def _conv1d_product(module: nn.Module, x: Tensor) -> Tensor:
    weight = cast(Tensor, module.weight)
    _check_width(x.shape[-1], weight.shape[0])
    return torch.matmul(x, weight)


def _check_width(width: int, own: int) -> None:
    """Refuse a row-parallel input of another width.  The error has no layer's name, as layers share compiled code."""
    if width != own:
        raise PlanError(
            f"a layer that is split row-wise was given {width} features, and this rank has weights for {own}: what is"
            " split column-wise before it did not run in this forward, unlike the forward by which the split was found."
            ' Leave both whole where a model calls a layer only now and then (split = {"name": "replicate"}), or use'
            " mesh.tensor = 1."
        )


def _reduce_output(
    reduce: Callable[[Tensor], Tensor], shared: _SharedInput, module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    shared.clear()
    return reduce(output)


def check_embedding(name: str, module: nn.Module) -> nn.Embedding:
    """Return an embedding that may be cut by its rows.

    Raises:
        PlanError: it works on all rows at once.
    """
    assert isinstance(module, nn.Embedding)
    for option, value in (("max_norm", module.max_norm), ("scale_grad_by_freq", module.scale_grad_by_freq or None)):
        if value is not None:
            raise PlanError(
                f"{name} is an nn.Embedding with {option} = {value}, which needs all its rows on one rank."
                f' Give it the kind "replicate" in [model.split], or build it without {option}.'
            )
    return module


def _vocabulary_embedding(name: str, module: nn.Module, view: GroupView) -> None:
    module = check_embedding(name, module)
    module.forward = partial(_vocabulary_forward, module, module.forward, view, module.num_embeddings // view.size)


def _vocabulary_forward(module: nn.Embedding, forward: Forward, view: GroupView, rows: int, input: Tensor) -> Tensor:
    """Look up the ids whose rows this rank has, zero for the others, and sum over the group.

    `padding_idx` keeps its whole-model value for initialisers; here its row is known by its local number, or not at
    all.
    """
    first = view.index * rows
    local = input - first
    elsewhere = (local < 0) | (local >= rows)
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - first if 0 <= padding - first < rows else None
    try:
        own_rows = forward(local.masked_fill(elsewhere, 0))
    finally:
        module.padding_idx = padding
    return reduce_from_group(own_rows.masked_fill(elsewhere[..., None], 0), view)
