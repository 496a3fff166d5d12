"""`weft describe`."""

from __future__ import annotations

import json as to_text
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli._options import Json, Overrides, RecipeFile, refuse_plan_settings
from weft.formatting import format_number

if TYPE_CHECKING:
    from weft.analysis.describe import ForwardDescription
    from weft.analysis.tensor_split.proposal import Proposal
    from weft.config.recipe import Recipe
    from weft.model.blueprint import Blueprint
    from weft.model.profile import Block, Operator, Profile


_MOST_KINDS = 3
"""Kinds of blocks of which the operators are listed: all of it fits on a screen."""
_MOST_WHOLE = 8
"""Modules that stay whole of which the reason is printed."""


def describe(
    recipe: RecipeFile,
    /,
    *,
    overrides: Overrides = (),
    json: Json = False,
) -> None:
    """Say what a recipe's model computes, and how it can be split.

    Block by block: what it computes and keeps, how it splits and where it may be cut, and what of
    it was not understood.

    Nothing is computed: the model runs on the meta device. Sizes are those of one sample's forward, in bf16 where the
    recipe permits it.
    """
    from weft.config.plan import Plan, apply_overrides
    from weft.config.recipe import load_recipe
    from weft.model.description import store_page, stored_page

    refuse_plan_settings("weft describe", overrides)
    with_overrides, _ = apply_overrides(load_recipe(recipe), Plan(), overrides)

    page = None if json else stored_page(with_overrides, Path(__file__))
    if page is None:
        page = _page(with_overrides, json=json)
        if not json:
            store_page(with_overrides, Path(__file__), page)
    print(page)


def _page(recipe: Recipe, *, json: bool) -> str:
    """Build a recipe's model, look at it, and return the description."""
    import torch

    from weft.analysis.blueprint import build_blueprint
    from weft.analysis.describe import examine
    from weft.analysis.stage_lines import stage_lines
    from weft.analysis.tensor_split.propose import propose_split
    from weft.errors import RecipeError
    from weft.model.build import build_model

    blueprint = build_blueprint(recipe)
    samples = _sample_lines(blueprint, recipe)
    dtype = torch.bfloat16 if "bf16" in recipe.permit.precision else torch.float32
    try:
        description = examine(blueprint, dtype=dtype)
        plain = build_model(recipe)
        proposal = propose_split(plain)
    except RecipeError as problem:
        if json:
            raise
        return "\n".join(
            [*samples, _tensor_line(blueprint), *stage_lines(blueprint), f"Operators: not understood: {problem}"]
        )
    if json:
        return to_text.dumps(_as_json(description, proposal, dtype.itemsize), indent=2)
    notes = (f"# {note}" for note in blueprint.notes)
    lines = [*_lines(description, dtype.itemsize), "", *samples, _tensor_line(blueprint), *notes, ""]
    return "\n".join([*lines, *_split_lines(proposal, covered=plain.splits), *stage_lines(blueprint)])


def _sample_lines(blueprint: Blueprint, recipe: Recipe) -> list[str]:
    """Return lines on the fields of a sample, for models that are described field by field."""
    if not blueprint.samples:
        return []
    from weft.run.data import data_shape
    from weft.run.data.preparation import describe_samples

    return describe_samples(data_shape(blueprint, recipe))


def _tensor_line(blueprint: Blueprint) -> str:
    """Return a line on the share of the model that tensor ranks divide, or the reason why they divide nothing."""
    if not blueprint.splits:
        return f"Tensor axis: nothing to split: {blueprint.why_not('tensor')}"
    total = divided = 0
    for name, parameter in blueprint.module.named_parameters():
        rule, own = blueprint.rule_of(name.rpartition(".")[0]), blueprint.rule_of_parameter(name)
        total += parameter.numel()
        if (rule is not None and rule.divides) or (own is not None and own.kind == "part"):
            divided += parameter.numel()
    sizes = ", ".join(f"{name} = {size}" for name, size in blueprint.divisible.items())
    share = f"Tensor axis: {divided / max(total, 1):.0%} of the parameters are divided"
    return share + (f"; it must divide {sizes}" if sizes else "")


def _lines(description: ForwardDescription, element_bytes: int) -> list[str]:
    profile = description.profile
    unit = f"sample of {profile.sequence_length:,} tokens" if profile.sequence_length > 1 else "sample"
    lines = [
        f"{profile.name}: {profile.num_parameters:,} parameters, {len(profile.blocks)} blocks"
        + (f", {profile.num_experts} experts" if profile.num_experts else ""),
        f"One {unit}: {_short(profile.flops_per_sample)}FLOP forward,"
        f" {_short(description.kept_bytes_per_sample)}B kept for backward"
        f" with one kernel per call ({'bf16' if element_bytes == 2 else 'fp32'}).",
    ]
    parts = _parts(profile)
    shown = [*parts[:_MOST_KINDS], *parts[-1:]] if len(parts) > _MOST_KINDS + 1 else parts
    for times, block in shown:
        lines += ["", f"{block.name}{f' × {times}' if times > 1 else ''}  ({block.parameters:,} parameters)"]
        lines.append(f"  {'operator':<34}{'kind':<13}{'split':<11}{'parameters':>14}{'FLOP':>9}{'kept':>9}  shape")
        lines += [_row(operator, profile.sequence_length, element_bytes) for operator in block.operators]
    if len(shown) < len(parts):
        lines += ["", f"{len(parts) - len(shown)} other kinds of blocks (--json has them)"]
    return lines + [f"assumed: {note}" for note in description.notes]


def _parts(profile: Profile) -> list[tuple[int, Block]]:
    """Stem, alike blocks once with their number, tail."""
    counted = [(times, block) for block, times in profile.count_blocks()]
    return [(times, block) for times, block in ((1, profile.stem), *counted, (1, profile.tail)) if block.operators]


def _row(operator: Operator, length: int, element_bytes: int) -> str:
    kept = operator.kept_elements_per_token * element_bytes + operator.kept_bytes_per_token
    return (
        f"  {operator.name:<33} {operator.kind:<13}{operator.split:<11}{operator.parameters:>14,}"
        f"{_short(operator.forward_flops(length) * length):>9}{_short(kept * length):>9}  {_shape(operator)}"
    ).rstrip()


def _shape(operator: Operator) -> str:
    if operator.kind == "attention":
        groups = f" over {operator.kv_heads}" if operator.kv_heads != operator.heads else ""
        return f"{operator.heads}{groups} heads of {operator.head_size}{', causal' if operator.causal else ''}"
    if not operator.n:
        return ""
    rows = f"{operator.rows_per_token:g} rows per token, " if operator.rows_per_token != 1 else ""
    return f"{rows}{operator.k} → {operator.n}{f', {operator.groups} groups' if operator.groups > 1 else ''}"


def _short(number: float) -> str:
    """`1.23 G`."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{format_number(number / size)} {unit}"
    return f"{format_number(number)} "


def _split_lines(proposal: Proposal, *, covered: bool) -> list[str]:
    from weft.analysis.tensor_split.proposal import lines_of

    if covered and not proposal.splits:
        return ["The model brings a split table, to which analysis of its graph adds nothing."]
    head = "Proposed by analysis of the graph" + (", beside the table that the model brings" if covered else "")
    lines = lines_of(proposal)
    whole = [line for line in lines if line.startswith("# whole")]
    left_out = whole[_MOST_WHOLE:]
    lines = [line for line in lines if line not in left_out]
    more = [f"# whole on every rank: {len(left_out)} others (--json has them)"] if left_out else []
    return [f"# {head}:", *lines, *more]


def _as_json(description: ForwardDescription, proposal: Proposal, element_bytes: int) -> dict[str, Any]:
    profile = description.profile
    return {
        "name": profile.name,
        "sequence_length": profile.sequence_length,
        "parameters": profile.num_parameters,
        "forward_flops_per_sample": profile.flops_per_sample,
        "kept_bytes_per_sample": description.kept_bytes_per_sample,
        "element_bytes": element_bytes,
        "blocks": list(description.block_names),
        "parts": [{"times": times, **asdict(block)} for times, block in _parts(profile)],
        "assumed": list(description.notes),
        "proposal": {**asdict(proposal), "divisible": dict(proposal.divisible)},
    }
