"""Descriptions of what a recipe names: reference models, and families of `transformers` from their `config.json`."""

from __future__ import annotations

from dataclasses import replace

from weft.config.plan import ModelFacts
from weft.config.recipe import ROUTER_LOSS, Recipe, ReferenceShape, read_hf_config
from weft.errors import RecipeError
from weft.model.description._description import Description
from weft.model.description._shapes import profile_of_shape, sizes_of_shape
from weft.model.families import UNKNOWN_FEATURES, Config, Family, Tables, family_of
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
    profile = profile_of_shape(shape)
    return replace(_described(profile, sizes_of_shape(shape)), num_experts=profile.num_experts)


def description_of_sizes(sizes: ModelSizes) -> Description:
    """Return the description of a transformer by its numbers alone: a well-known model, that nobody has built."""
    return replace(_described(profile_of_sizes(sizes), sizes), num_experts=sizes.num_experts)


def _described(profile: Profile, sizes: ModelSizes | None, tables: Tables | None = None) -> Description:
    """A description by numbers: those of a transformer are of tokens in sequences."""
    return Description(
        profile=profile,
        tables=tables or Tables(),
        sizes=sizes,
        sequence_length=None if sizes is None else sizes.sequence_length,
        vocabulary_size=profile.vocabulary_size or None,
    )


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
        can_share_sequence=not windows,
        attends_alone=windows and not sizes.num_experts,  # looking at its forward shows them
        no_shared_sequence=family.no_shared_sequence(config),
        no_pipeline=why_no_pipeline([ROUTER_LOSS]) if family.router and config.get("output_router_logits") else "",
    )
    mixtures = (sizes.is_mixture(layer) for layer in range(sizes.num_layers))
    return replace(_described(profile, sizes, tables), num_experts=sizes.num_experts if any(mixtures) else 0)


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
        return ModelFacts(name=name, sequence_length=model.sequence_length, no_grid=UNKNOWN_FEATURES)
    config = read_hf_config(model.hf)
    kind = str(config.get("model_type", "model"))
    return ModelFacts(
        name=kind,
        sequence_length=model.sequence_length,
        vocabulary_size=config.get("vocab_size"),
    )
