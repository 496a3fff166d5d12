"""Descriptions of what a recipe names: reference models, and families of `transformers` from their `config.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.config.plan import Limit, ModelFacts
from weft.config.recipe import ROUTER_LOSS, DecoderShape, Recipe, ReferenceShape, read_hf_config
from weft.errors import RecipeError
from weft.model.description._description import Description
from weft.model.description._shapes import profile_of_shape, sizes_of_shape
from weft.model.families import (
    DROPPED_ATTENTION,
    NO_SEQUENCE,
    ROUTED_FEATURES,
    UNKNOWN_FEATURES,
    WINDOWED_ATTENTION,
    Config,
    Family,
    Tables,
    family_of,
)
from weft.model.profile import ModelSizes, Profile, profile_of_sizes, why_no_pipeline


def description_of(recipe: Recipe) -> Description | None:
    """Return the description of a reference model, or of a model of a family that has a file.

    None for what only building it would tell: a factory's, other families, and any with adapters.

    Raises:
        RecipeError: `model.hf` names no readable `config.json`, or one that makes no model.
    """
    model = recipe.model
    if model.adapter is not None:
        return None
    if model.shape is not None:
        return description_of_shape(model.shape)
    if model.hf is None:
        return None
    config = read_hf_config(model.hf)
    family = family_of(str(config.get("model_type")))
    if family is None:
        return None
    return describe_family(family, config, model.sequence_length, where=model.hf)


def description_of_shape(shape: ReferenceShape) -> Description:
    """Return the description of a reference model; its tables stand beside its modules (`weft.model`)."""
    terms = (*shape.auxiliary_losses,) if isinstance(shape, DecoderShape) else ()
    return _described(profile_of_shape(shape), sizes_of_shape(shape), terms=terms)


def description_of_sizes(sizes: ModelSizes) -> Description:
    """Return the description of a transformer by its numbers alone: a well-known model, that nobody has built."""
    return _described(profile_of_sizes(sizes), sizes)


def _described(
    profile: Profile,
    sizes: ModelSizes | None,
    tables: Tables | None = None,
    *,
    context: str = "",
    windows: bool = False,
    terms: Sequence[str] = (),
) -> Description:
    """A description by numbers: those of a transformer are of tokens in sequences.

    `context`: why ranks cannot share a sequence, as its family says.  `windows`: masks of windows are the library's.
    `terms`: auxiliary ones of its loss.
    """
    tables = tables or Tables()
    limits: dict[Limit, str] = {**tables.limits, **_limits(profile, sizes, context, windows, terms)}
    facts = ModelFacts(
        name=profile.name,
        limits={limit: reason for limit, reason in limits.items() if reason},
        num_blocks=len(profile.blocks),
        num_experts=profile.num_experts,
        attention_heads=profile.attention_heads,
        divisible=dict(profile.divisible) or (None if tables.splits else {}),
        num_parameters=profile.num_parameters,
        hidden_size=profile.hidden_size,
        vocabulary_size=profile.vocabulary_size or None,
        sequence_length=None if sizes is None else sizes.sequence_length,
        tied=profile.tied,
        has_batch_norm=bool(profile.facts.has_batch_norm),
    )
    return Description(profile=replace(profile, facts=facts), tables=tables, sizes=sizes)


def _limits(
    profile: Profile, sizes: ModelSizes | None, context: str, windows: bool, terms: Sequence[str]
) -> dict[Limit, str]:
    """What a model that is known by its numbers cannot do, and why; empty: it can."""
    pipeline = why_no_pipeline(terms) if terms else ""
    sees_windows = windows and not profile.num_experts  # which looking at its forward shows; of a mixture it does not
    grid = UNKNOWN_FEATURES if sizes is None else ROUTED_FEATURES if profile.num_experts else context
    if sizes is not None and not context:
        if profile.sequence_length == 1:
            context = f"samples of a {profile.name} are no sequences"
        elif terms:
            context = "its loss has auxiliary terms over the batch"
        elif profile.has_windows and not sees_windows:
            context = "its attention sees a window of tokens"
    cube = WINDOWED_ATTENTION if sees_windows else DROPPED_ATTENTION if profile.drops_attention else context
    return {
        "pipeline": pipeline,
        "sequence": NO_SEQUENCE if windows else "",
        "context": context,
        "mesh_2d": grid,
        "mesh_3d": "" if grid else cube,
    }


def describe_family(
    family: Family, config: Config, sequence_length: int | None = None, *, where: str = "config.json"
) -> Description:
    """Return the description of a model of a family.  Without a length, samples are as long as the model can take.

    Raises:
        RecipeError: a size is missing or none; names `where` the configuration came from.
    """
    kind = config.get("model_type", "model")
    try:
        sizes = family.sizes(config)
        sizes = replace(sizes, sequence_length=sequence_length or sizes.sequence_length)
        windows = family.has_windows(config)
        tables = family.tables(config, sizes)
    except KeyError as missing:
        raise RecipeError(f'model.hf = "{where}": its config.json, of a {kind}, has no {missing.args[0]}.') from None
    except RecipeError as impossible:
        raise RecipeError(f'model.hf = "{where}": its config.json makes no {kind}: {impossible}') from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        raise RecipeError(
            f'model.hf = "{where}": the config.json of this {kind} does not hang together'
            f" ({type(problem).__name__}: {problem}). Use the config.json that the model came with."
        ) from problem
    profile = profile_of_sizes(sizes)
    divisible = {family.named(name): size for name, size in profile.divisible if tables.splits}
    tables = replace(tables, divisible=divisible)
    if windows:  # their masks are made outside of the blocks: where it may be cut is seen when it is built
        tables = replace(tables, cut=None)
    profile = replace(
        profile,
        divisible=tuple(divisible.items()),
        num_experts=sizes.num_experts if any(map(sizes.is_mixture, range(sizes.num_layers))) else 0,
    )
    terms = [ROUTER_LOSS] if family.router and config.get("output_router_logits") else []
    context = family.no_shared_sequence(config)
    return _described(profile, sizes, tables, context=context, windows=windows, terms=terms)


def profile_of(recipe: Recipe) -> Profile | None:
    """Return the profile of `description_of`."""
    description = description_of(recipe)
    return None if description is None else description.profile


def facts_of(recipe: Recipe) -> ModelFacts:
    """Return what a recipe says of its model: all of a described one, next to nothing of others.

    Raises:
        RecipeError: as `description_of`.
    """
    description = description_of(recipe)
    if description is not None:
        return description.facts
    model = recipe.model
    if model.hf is None:
        name = model.factory or "model"
        return ModelFacts(name=name, sequence_length=model.sequence_length, limits={"mesh_2d": UNKNOWN_FEATURES})
    config = read_hf_config(model.hf)
    kind = str(config.get("model_type", "model"))
    return ModelFacts(
        name=kind,
        sequence_length=model.sequence_length,
        vocabulary_size=config.get("vocab_size"),
    )
