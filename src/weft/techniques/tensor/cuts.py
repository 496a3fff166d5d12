"""The cut of every parameter of the full model, from split rules by module name; and the cutting itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from weft.comm.mesh import GroupView
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.families import INHERITED, SplitRule, Tables
from weft.model.plain_layers import is_conv1d, is_linear
from weft.techniques.core import ModelLayout, Split

_NO_CUTS = (*INHERITED, "gathered_input", "gather", "part")
"""Kinds of modules whose parameters stay whole."""
_FITTING = {
    "vocab": "an nn.Embedding",
    **dict.fromkeys(("column", "row"), "a linear layer"),
    **dict.fromkeys(("channel_out", "channel_in"), "an nn.Conv1d, Conv2d or Conv3d with groups = 1"),
    "channels": "a batch norm, an nn.GroupNorm or a convolution in groups",
}
"""Kind → the modules that split so."""


def is_coded(module: nn.Module) -> bool:
    """Whether this is a `QuantisedLinear`, whose file only those load that have one."""
    return hasattr(module, "cut_dims")


def is_magnitude(module: nn.Module) -> bool:
    """Whether this is the module of `peft` that holds DoRA's magnitudes beside a linear layer."""
    return any(cls.__name__ == "DoraLinearLayer" for cls in type(module).__mro__)


def split_parameters(blueprint: Blueprint, view: GroupView) -> dict[str, Split]:
    """Return the cut of every parameter of the whole model that a rule cuts, and of the running statistics of channels,
    by name; others are replicated.

    Raises:
        PlanError: a rule that does not fit its module, or sizes that do not divide.
    """
    splits: dict[str, Split] = {}
    for name, child in blueprint.module.named_modules(remove_duplicate=False):
        rule = blueprint.rule_of(name)
        cuts = {} if rule is None or rule.kind in _NO_CUTS else _cut_dims(name, child, rule, blueprint.module)
        for leaf in cuts:
            _check_own(name, child, leaf)
        for leaf, parameter in child.named_parameters(recurse=False):
            whole_name = f"{name}.{leaf}" if name else leaf
            own = blueprint.rule_of_parameter(whole_name)
            if own is not None and own.kind == "part":
                splits[whole_name] = _split(whole_name, parameter, own.dim, own, view)
            elif rule is not None and leaf in cuts:
                splits[whole_name] = _split(whole_name, parameter, cuts[leaf], rule, view)
        if rule is not None and rule.kind == "channels":
            _check_groups(name, child, rule, view.size)
            for leaf, buffer in child.named_buffers(recurse=False):
                if leaf in cuts:
                    splits[f"{name}.{leaf}"] = _split(f"{name}.{leaf}", buffer, 0, rule, view)
    return splits


def _split(name: str, parameter: Tensor, dim: int, rule: SplitRule, view: GroupView) -> Split:
    if dim >= parameter.dim():
        raise PlanError(
            f'model.split: "{rule.match}" cuts dimension {dim} of {name}, which has the shape'
            f" {tuple(parameter.shape)}. Name a dimension that it has, or leave the rule out."
        )
    _check_divides(name, parameter.shape, dim, rule, view.size)
    return Split(dim=dim, parts=view.size, index=view.index, blocks=rule.blocks)


def _cut_dims(name: str, module: nn.Module, rule: SplitRule, root: nn.Module) -> Mapping[str, int]:
    """Return parameter → dimension along which it is cut, for a matching module; others are replicated."""
    if rule.kind == "vocab" and isinstance(module, nn.Embedding):
        return {"weight": 0}
    if rule.kind in ("column", "row") and is_coded(module):
        dims: Mapping[str, int] = module.cut_dims(column=rule.kind == "column")  # pyright: ignore[reportCallIssue]
        return dims
    linear, conv1d = is_linear(module), is_conv1d(module)
    if rule.kind in ("column", "row") and (linear or conv1d):
        _refuse_fused_attention(name, rule, root)
        # nn.Linear stores (outputs, inputs), transformers' Conv1D (inputs, outputs).  Column cuts the outputs, and the
        # bias with them; row cuts the inputs, and its bias is added once, after the sum.
        if rule.kind == "column":
            return {"weight": 0 if linear else 1, "bias": 0}
        return {"weight": 1 if linear else 0}
    if rule.kind in ("column", "row") and is_magnitude(module):
        return {"weight": 0} if rule.kind == "column" else {}
    if rule.kind in ("channel_out", "channel_in", "channels"):
        from weft.model.channels import channel_cuts  # loaded where convolutions are split

        cuts = channel_cuts(module, rule.kind)
        if cuts is not None:
            return cuts
    fitting = _FITTING.get(rule.kind)
    if fitting is None:
        raise PlanError(
            f'model.split: "{rule.match}" = "{rule.kind}" is not a 1-D tensor split, so plan.mesh.tensor > 1'
            f' cannot use it for {name}. Set it to "replicate", or plan.mesh.tensor = 1.'
        )
    raise PlanError(
        f'model.split: "{rule.match}" = "{rule.kind}" also matches {name}, a {type(module).__name__}, but only'
        f' {fitting} splits so. Narrow the pattern, or give {name} the kind "replicate" in a rule before it.'
    )


def _check_own(name: str, module: nn.Module, leaf: str) -> None:
    """Raise `PlanError` if a tensor to be cut is no parameter, but computed from others at every step."""
    if is_parametrized(module, leaf) or isinstance(vars(module).get(leaf), Tensor):
        raise PlanError(
            f"{name}.{leaf} is computed from other parameters (a weight norm, a spectral norm, pruning), which"
            f' plan.mesh.tensor > 1 cannot cut. Give {name} the kind "replicate" in [model.split], or use'
            " plan.mesh.tensor = 1."
        )


def _refuse_fused_attention(name: str, rule: SplitRule, root: nn.Module) -> None:
    parent = name.rpartition(".")[0]
    if isinstance(root.get_submodule(parent), nn.MultiheadAttention):
        raise PlanError(
            f'model.split: "{rule.match}" = "{rule.kind}" matches {name} inside an nn.MultiheadAttention, which'
            " computes in one call and never runs its projections as modules. Write attention with separate linear"
            ' layers to split it, or use "replicate".'
        )


def _check_divides(name: str, shape: torch.Size, dim: int, rule: SplitRule, parts: int) -> None:
    size = shape[dim]
    if size % (parts * rule.blocks) == 0:
        return
    divisors = [str(n) for n in range(1, parts) if size % (n * rule.blocks) == 0]
    blocks = f" in {rule.blocks} blocks" if rule.blocks > 1 else ""
    unit = parts * rule.blocks
    larger = f", or pad the size to {-(-size // unit) * unit}" if size > parts else ""
    raise PlanError(
        f"plan.mesh.tensor = {parts} does not divide dimension {dim} of {name}, {tuple(shape)}, which is split"
        f' {rule.kind} ("{rule.match}"){blocks}. Use tensor = {" or ".join(divisors) or "1"}{larger}.'
    )


def _check_groups(name: str, module: nn.Module, rule: SplitRule, parts: int) -> None:
    from weft.model.channels import groups_of  # as above

    counted = groups_of(module)
    groups = 0 if counted is None else getattr(module, counted)
    if groups % (parts * rule.blocks):
        divisors = [str(n) for n in range(1, parts) if groups % (n * rule.blocks) == 0]
        raise PlanError(
            f"plan.mesh.tensor = {parts} does not share out the {groups} groups of {name} ({counted}), which works on"
            f' each rank\'s channels ("{rule.match}"). Use tensor = {" or ".join(divisors) or "1"}.'
        )


def check_sizes(blueprint: Blueprint, parts: int) -> None:
    """Raise PlanError when the tensor axis, or the side of a grid, does not divide the sizes that the model names."""
    sizes = blueprint.divisible
    wrong = {name: size for name, size in sizes.items() if size % parts}
    if not wrong:
        return
    common = math.gcd(*sizes.values())
    choices = [str(n) for n in range(1, common + 1) if common % n == 0]
    listed = ", ".join(f"{name} = {size}" for name, size in wrong.items())
    if len(choices) == 1:
        fix = "Use 1, or change those sizes"
    else:
        fix = f"Use {', '.join(choices[:-1])} or {choices[-1]}" if len(choices) <= 8 else f"Use a divisor of {common}"
    raise PlanError(f"plan.mesh.tensor = {parts} does not divide {listed}. {fix}.")


def check_ties(names: Mapping[str, str], splits: Mapping[str, Split], tables: Tables) -> None:
    """Raise PlanError when two modules share a parameter and cut it differently."""
    for name, first in names.items():
        mine, theirs = splits.get(name), splits.get(first)
        if mine != theirs:
            owners = [parameter.rpartition(".")[0] for parameter in (first, name)]
            kinds = [f"{owner} ({tables.kind_of(owner) or 'no rule'})" for owner in owners]
            raise PlanError(
                f"{kinds[0]} and {kinds[1]} share one parameter, {first}, but would split it differently over"
                " plan.mesh.tensor. Give both the same cut in [model.split]:"
                ' "vocab" for an embedding, "column" for its head.'
            )


def cut_parameters(part: nn.Module, splits: Mapping[str, Split]) -> None:
    """Replace every cut parameter and buffer by this rank's part: on meta an empty one, else sliced data.  Ties stay
    ties."""
    made: dict[int, Tensor] = {}
    buffers = part.named_buffers(remove_duplicate=False)
    for name, whole in [*part.named_parameters(remove_duplicate=False), *buffers]:
        split = splits.get(name)
        if split is None:
            continue
        if id(whole) not in made:
            data = whole.detach()
            local = data.new_empty(split.local_shape(data.shape)) if data.is_meta else split.slice(data)
            is_parameter = isinstance(whole, nn.Parameter)
            made[id(whole)] = nn.Parameter(local, requires_grad=whole.requires_grad) if is_parameter else local
        owner, _, leaf = name.rpartition(".")
        setattr(part.get_submodule(owner), leaf, made[id(whole)])


def mark_partial(layout: ModelLayout, name: str) -> None:
    """Note that each tensor rank computes only its part of this parameter's gradient."""
    entry = layout.entries.get(name)
    if entry is not None and not entry.is_buffer and "tensor" not in entry.split_axes:
        layout.entries[name] = replace(entry, placements={**entry.placements, "tensor": "partial"})
