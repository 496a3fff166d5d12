"""Build a blueprint from a recipe."""

from __future__ import annotations

from dataclasses import replace

from weft.config.recipe import ConvNetShape, DecoderShape, EncoderShape, MlpShape, Recipe, ReferenceShape
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint
from weft.model.families import SplitRule
from weft.model.losses import loss_by_name, token_loss
from weft.model.patterns import require_matches


def build_model(recipe: Recipe) -> Blueprint:
    """Return the blueprint of the recipe's model, with the recipe's own splits, frozen parameters and loss applied.

    Every rank builds the same; nothing is communicated, and no weights are held unless the model is a plain module of a
    factory (which is really constructed, as its notes say).

    Raises:
        RecipeError: the model cannot be found or built, or a pattern of the recipe matches nothing.
    """
    isolated = recipe.data.documents == "isolated"
    model = recipe.model
    if model.reference is not None:
        assert model.shape is not None, "a recipe with model.reference has a shape"
        blueprint = build_reference(model.shape, isolated_documents=isolated)
    elif model.hf is not None:
        from weft.model.hf import build_hf

        blueprint = build_hf(model, isolated_documents=isolated)
    else:
        from weft.model.reference.factory import build_factory

        blueprint = build_factory(model, seed=recipe.run.seed)
    blueprint.has_known_forward = model.reference is not None or (model.hf is not None and blueprint.has_known_forward)
    _apply_split(blueprint, recipe)
    _freeze(blueprint, recipe)
    _apply_loss(blueprint, recipe)
    if model.adapter is not None:
        from weft.model.adapters import apply_adapter

        apply_adapter(blueprint, recipe)
    return blueprint


def build_reference(shape: ReferenceShape, *, isolated_documents: bool = False) -> Blueprint:
    """Return the blueprint of a reference model.

    Raises:
        RecipeError: documents are to be isolated in a model that is no decoder.
    """
    # Each kind is loaded when it is built: a rank needs one of them.
    if isinstance(shape, DecoderShape) and shape.num_experts:
        from weft.model.reference.mixture_decoder import build_mixture_decoder

        return build_mixture_decoder(shape, isolated_documents=isolated_documents)
    if isinstance(shape, DecoderShape):
        from weft.model.reference.decoder import build_decoder

        return build_decoder(shape, isolated_documents=isolated_documents)
    if isolated_documents:
        raise RecipeError(
            f'data.documents = "isolated" needs a model that takes document borders, which the reference'
            f' {type(shape).__name__.removesuffix("Shape").lower()} does not. Use "packed", or reference = "decoder".'
        )
    match shape:
        case EncoderShape():
            from weft.model.reference.encoder import build_encoder

            return build_encoder(shape)
        case MlpShape():
            from weft.model.reference.mlp import build_mlp

            return build_mlp(shape)
        case ConvNetShape():
            from weft.model.reference.convnet import build_convnet

            return build_convnet(shape)


def _apply_split(blueprint: Blueprint, recipe: Recipe) -> None:
    """Put the recipe's own rules first; a rule about modules that a table knows keeps the table's fused blocks."""
    names = [name for name, _ in blueprint.module.named_modules() if name]
    rules: list[SplitRule] = []
    for pattern, kind in recipe.model.split.items():
        require_matches("model.split", pattern, names, "module")
        rules.append(SplitRule(match=pattern, kind=kind))
    blueprint.split = (*rules, *blueprint.split)


def _freeze(blueprint: Blueprint, recipe: Recipe) -> None:
    parameters = dict(blueprint.module.named_parameters(remove_duplicate=False))
    for pattern in recipe.model.freeze:
        for name in require_matches("model.freeze", pattern, parameters, "parameter"):
            parameters[name].requires_grad_(False)
    if parameters and not any(parameter.requires_grad for parameter in parameters.values()):
        raise RecipeError(
            f"model.freeze = {list(recipe.model.freeze)} freezes every parameter, so there is nothing to train."
            " Remove a pattern."
        )


def _apply_loss(blueprint: Blueprint, recipe: Recipe) -> None:
    """A loss other than `tokens` reads logits as they are, so the head gathers them and is not fused."""
    if recipe.model.loss is None:
        return
    chosen, terms = loss_by_name(recipe.model.loss), getattr(blueprint.loss, "auxiliary", None)
    blueprint.loss = chosen
    if terms:
        from weft.model.auxiliary import LossWithTerms  # loaded where a model has such terms

        blueprint.loss = LossWithTerms(chosen, terms)
    head = blueprint.vocabulary_head
    if chosen is token_loss or head is None:
        return
    blueprint.vocabulary_head = None
    blueprint.split = [replace(rule, gather_output=True) if rule.match == head else rule for rule in blueprint.split]
