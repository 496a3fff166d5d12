"""Shrink a recipe's model until a plan can be tried on one machine in seconds, structure and awkwardness kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from weft.config.plan import ModelFacts, Plan
from weft.config.recipe import (
    BatchRecipe,
    ConvNetShape,
    DataRecipe,
    DataSource,
    MlpShape,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    read_hf_config,
)
from weft.errors import RecipeError
from weft.formatting import format_memory
from weft.model.build import build_model
from weft.model.description import SMALL_SEQUENCE_LENGTH, shrink_config, shrink_shape
from weft.techniques.tensor.mesh_2d.shape import num_loss_replicas
from weft.verify.numerics._scale_down import scale_down_plan

STEPS = 3
"""Optimizer steps of a check: after the third, a wrong divisor or clip norm is in losses and weights."""
_BYTES_PER_PARAMETER = 48
"""fp64 weights, gradients, two moments, and two copies to compare, of every data rank and of the one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCase:
    """A recipe and a plan small enough to run here."""

    recipe: Recipe
    plan: Plan
    label_range: int | None
    """Class labels are below this; None: as the blueprint says."""
    notes: tuple[str, ...] = ()
    """Sentences on what the small model leaves out."""


def shrink_case(
    recipe: Recipe, plan: Plan, facts: ModelFacts, *, processes: int | None, folder: Path, memory_bytes: int
) -> SmallCase:
    """Return a small model under the plan scaled down.  Writes a Hugging Face configuration into `folder`.

    `facts` are those of the model as it is.  A factory's model cannot be shrunk: it runs as it is, and `memory_bytes`
    says how much it may take.

    Raises:
        PlanError: too few processes, or a technique that the model does not allow.
        RecipeError: a factory's model that is too large, or a model that cannot be made small.
    """
    model = recipe.model
    may_shrink = model.factory is None
    scaled = scale_down_plan(plan, processes=processes, num_blocks=facts.num_blocks, may_shrink=may_shrink)
    notes: list[str] = []
    if not may_shrink:
        _check_memory(facts, scaled.plan, model, memory_bytes)
        notes.append(f"{model.factory} is no model that Weft can shrink: it runs as it is")
    small = replace(
        recipe,
        model=_shrink_model(model, scaled.num_blocks, _SplitSizes.of(plan, scaled.plan, facts), folder),
        data=DataRecipe(train=(DataSource(source="synthetic"),), documents=recipe.data.documents),
        batch=BatchRecipe(global_batch_size=scaled.plan.global_batch_size),
        optimizer=_shrink_optimizer(recipe),
        run=replace(recipe.run, steps=STEPS, evaluate_every=None, evaluate_batches=None, save_every=None),
        permit=replace(recipe.permit, precision=("fp64", "fp32", "bf16", "fp16")),
        origins={},
    )
    small, dropped = _without_absent_patterns(small)
    return SmallCase(recipe=small, plan=scaled.plan, label_range=_label_range(small.model), notes=(*notes, *dropped))


# ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _SplitSizes:
    """Numbers by which a plan's ranks divide the sizes of a model."""

    whole: int
    """Parts of its heads under the plan, and of all else that tensor ranks divide."""
    scaled: int
    """The same under the plan scaled down."""
    length: int
    """Tokens of which each of the ranks that share a sequence has some."""
    experts: int
    """Ranks that share experts out, under the plan scaled down."""

    @staticmethod
    def of(plan: Plan, scaled: Plan, facts: ModelFacts) -> _SplitSizes:
        whole, small = ((num_loss_replicas(one), one.mesh.context) for one in (plan, scaled))
        swaps = plan.context_parallel.scheme in (
            "ulysses",
            "usp",
        )  # tensor ranks have heads, of which context ranks have some
        # Context ranks take two runs of tokens each where causal attention is balanced; one token more makes shares
        # unequal.
        runs = 2 * small[1] * (small[0] if scaled.tensor_parallel.sequence else 1) if small[1] > 1 else 0
        length = max(SMALL_SEQUENCE_LENGTH, runs + 1)
        return _SplitSizes(
            whole=whole[0] * (whole[1] if swaps else 1),
            scaled=small[0] * (small[1] if swaps else 1),
            length=min(facts.sequence_length or length, length),
            experts=scaled.mesh.expert,
        )


def _shrink_model(model: ModelRecipe, num_blocks: int | None, parts: _SplitSizes, folder: Path) -> ModelRecipe:
    if model.shape is not None:
        blocks = num_blocks or model.shape.num_layers
        sizes = (parts.whole, parts.scaled, parts.length)
        return replace(model, shape=shrink_shape(model.shape, blocks, *sizes, experts=parts.experts))
    if model.hf is None:
        return model
    path = folder / "config.json"
    config = read_hf_config(model.hf)
    small = shrink_config(config, num_blocks, parts.whole, parts.scaled, experts=parts.experts)
    path.write_text(json.dumps(small))
    _copy_settings(model.hf, folder)
    return replace(model, hf=str(path), sequence_length=min(model.sequence_length or parts.length, parts.length))


def _copy_settings(location: str, folder: Path) -> None:
    """Let the small model have a tokenizer where the model has one: samples have masks because of it."""
    from weft.config.recipe.hf_folder import TOKENIZER_CONFIG, read_hf_processors

    tokenizer = read_hf_processors(location).tokenizer
    if tokenizer is not None:
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(tokenizer))


def _label_range(model: ModelRecipe) -> int | None:
    if isinstance(model.shape, MlpShape | ConvNetShape):
        return model.shape.num_classes
    return None


def _check_memory(facts: ModelFacts, plan: Plan, model: ModelRecipe, memory_bytes: int) -> None:
    parameters = facts.num_parameters or 0
    copies = 1 + plan.mesh.data
    need = parameters * _BYTES_PER_PARAMETER * copies
    if need > memory_bytes:
        raise RecipeError(
            f'model.factory = "{model.factory}" makes {parameters:,} parameters, and Weft cannot shrink a model of'
            f" your own: {copies} copies in fp64 would take about {format_memory(need)}, and"
            f" {format_memory(memory_bytes)} may be used here. Give the factory smaller arguments, as in"
            " --set recipe.model.arguments.num_layers=4."
        )


# ── the rest of the recipe ────────────────────────────────────────────────────────────────────────────────────────────


def _shrink_optimizer(recipe: Recipe) -> OptimizerRecipe:
    """The recipe's own, in a run of three steps."""
    optimizer = recipe.optimizer
    warmup = min(optimizer.warmup_steps, STEPS - 1)
    decay = None if optimizer.decay_steps is None else max(1, min(optimizer.decay_steps, STEPS - warmup))
    return replace(optimizer, warmup_steps=warmup, decay_steps=decay)


def _without_absent_patterns(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Leave out patterns over blocks that the small model does not have any more."""
    model, groups = recipe.model, recipe.optimizer.groups
    if not (model.freeze or model.split or groups):
        return recipe, []
    bare = replace(recipe, model=replace(model, freeze=(), split={}))
    # Patterns are matched against the small model, without those that may match nothing, or building it would fail.
    module = build_model(bare).module
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in module.named_modules()]
    dropped: list[str] = []

    def present(pattern: str, names: Sequence[str], setting: str) -> bool:
        matches = any(fnmatchcase(name, pattern) for name in names)
        if not matches:
            dropped.append(f'{setting} "{pattern}" matches nothing in the small model and is not checked')
        return matches

    small = replace(
        recipe,
        model=replace(
            model,
            freeze=tuple(p for p in model.freeze if present(p, parameters, "model.freeze")),
            split={p: kind for p, kind in model.split.items() if present(p, modules, "model.split")},
        ),
        optimizer=replace(
            recipe.optimizer, groups=tuple(g for g in groups if present(g.match, parameters, "optimizer.groups"))
        ),
    )
    return small, dropped
