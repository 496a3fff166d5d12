"""A user's own model: `module:function`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from weft.config.recipe import ModelRecipe
from weft.errors import RecipeError, did_you_mean
from weft.model._imports import import_attribute
from weft.model.blueprint import Blueprint
from weft.model.examples import token_example
from weft.model.losses import class_loss, token_loss
from weft.model.seeding import seeded

_FIELDS = {
    "tokens": "tokens",
    "input_ids": "tokens",
    "images": "images",
    "pixel_values": "images",
    "positions": "positions",
    "position_ids": "positions",
    "document_ids": "document_ids",
}
"""Names that a forward may give to its arguments → field of the batch."""
_NO_MODELS = ("None", "int", "float", "str", "bytes", "bool", "list", "dict", "tuple", "set", "Tensor")
"""Return annotations of functions that do not make models."""


def build_factory(recipe: ModelRecipe, *, seed: int = 0) -> Blueprint:
    """Call the recipe's factory with its arguments and return a blueprint of what it returns.

    A `Blueprint` is taken as it is.  A plain module has been constructed for real, with `seed` in torch's default CPU
    generator so that all ranks agree; it has no tables but those of `[model.split]`.  Its required arguments are found
    in the batch by name; a single one of another name is `tokens` if the recipe gives a sequence length, else `images`.

    Raises:
        RecipeError: the factory cannot be found, called, or returns something else.
    """
    assert recipe.factory is not None
    _check_not_of_python(recipe.factory, recipe.arguments)
    function = import_attribute("model.factory", recipe.factory)
    _check_makes_models(recipe.factory, function, recipe.arguments)
    _check_arguments(recipe.factory, function, recipe.arguments)
    built = _call(recipe.factory, function, recipe.arguments, seed)
    if isinstance(built, Blueprint | nn.Module):
        blueprint = built if isinstance(built, Blueprint) else _plain(recipe, built)
        kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
        hooked = any(getattr(parameter, kind, None) for parameter in blueprint.module.parameters() for kind in kinds)
        if hooked or blueprint.vocabulary_head is not None:
            from weft.model.hooks import refuse_given  # most models have none

            refuse_given(blueprint.module, blueprint.vocabulary_head, f"in {recipe.factory}")
        return blueprint
    raise RecipeError(
        f'model.factory = "{recipe.factory}" returned a {type(built).__name__}.'
        " Return a torch.nn.Module or a weft.model.Blueprint."
    )


def _format_call(path: str, arguments: Mapping[str, Any]) -> str:
    return f"{path.replace(':', '.')}({', '.join(f'{name}={value!r:.80}' for name, value in arguments.items())})"


def _check_not_of_python(path: str, arguments: Mapping[str, Any]) -> None:
    """Nothing in Python's own library makes models, and some of it does harm (os:system)."""
    package = path.partition(":")[0].partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__":
        raise RecipeError(
            f'model.factory = "{path}" is of Python\'s own library, which makes no models:'
            f" {_format_call(path, arguments)} was not called."
            " Name a function that returns a torch.nn.Module, and read a recipe before you run it."
        )


def _check_makes_models(path: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse to call what says that it returns something else than a model."""
    if isinstance(function, type):
        problem = None if issubclass(function, nn.Module | Blueprint) else "is a class of other things"
    elif inspect.isbuiltin(function):
        problem = "is built into an extension, and makes no models"
    else:
        annotation = getattr(function, "__annotations__", {}).get("return", Any)
        name = (
            "None"
            if annotation is None
            else annotation
            if isinstance(annotation, str)
            else getattr(annotation, "__name__", "")
        )
        problem = f"says that it returns a {name}" if name in _NO_MODELS else None
    if problem is not None:
        raise RecipeError(
            f'model.factory = "{path}" {problem}: {_format_call(path, arguments)} was not called.'
            " Name a class of torch.nn.Module, or a function that returns one or a weft.model.Blueprint."
        )


def _check_arguments(path: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a built-in without a signature: only calling it can tell
    try:
        signature.bind(**arguments)
    except TypeError as problem:
        hints = [did_you_mean(name, signature.parameters) for name in arguments if name not in signature.parameters]
        raise RecipeError(
            f'model.arguments do not fit model.factory = "{path}": {problem}.{"".join(hints)}'
            f" Its signature is {signature}."
        ) from None


def _call(path: str, function: Callable[..., Any], arguments: Mapping[str, Any], seed: int) -> Any:
    try:
        with seeded(seed):
            return function(**arguments)
    except Exception as problem:
        raise RecipeError(
            f'model.factory = "{path}" raised {type(problem).__name__}: {problem}.'
            f" Make {path.replace(':', '.')}({', '.join(f'{k}={v!r}' for k, v in arguments.items())}) work first."
        ) from problem


def _plain(recipe: ModelRecipe, module: nn.Module) -> Blueprint:
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise RecipeError(
            f'model.factory = "{recipe.factory}" returned a module on the meta device, which has no weights.'
            " Construct it on the CPU, or return a weft.model.blueprint.Blueprint whose `initialise` fills each module."
        )
    inputs = _inputs(recipe, module)
    reads_tokens = "tokens" in inputs.values()
    length = recipe.sequence_length
    if reads_tokens and length is None:
        raise RecipeError(
            f'model.factory = "{recipe.factory}" reads tokens, and nothing says how many make a sample.'
            " Set model.sequence_length."
        )
    embeddings = [child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)]
    return Blueprint(
        module=module,
        inputs=inputs,
        loss=token_loss if reads_tokens else class_loss,
        initialise=None,
        task="causal_lm" if reads_tokens else "classification",
        vocabulary_size=embeddings[0] if reads_tokens and embeddings else None,
        flops_per_sample=6.0 * sum(p.numel() for p in module.parameters()) * (length or 1),
        example=token_example(length, inputs.values()) if reads_tokens and length else None,
        sequence_length=length,
        notes=(
            f"{recipe.factory} is really constructed, whole, on every rank: Weft cannot repeat its initialisation"
            " parameter by parameter. Return a weft.model.blueprint.Blueprint to build it in pieces.",
        ),
    )


def _inputs(recipe: ModelRecipe, module: nn.Module) -> dict[str, str]:
    parameters = inspect.signature(module.forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    unknown = [name for name in required if name not in _FIELDS]
    if len(required) == 1 and unknown:
        return {required[0]: "images" if recipe.sequence_length is None else "tokens"}
    if unknown or not required:
        raise RecipeError(
            f'model.factory = "{recipe.factory}": forward{inspect.signature(module.forward)} has arguments that no'
            f" batch field fits ({', '.join(unknown) or 'none is required'})."
            " Return a weft.model.blueprint.Blueprint with `inputs`, which maps arguments to batch fields."
        )
    return {name: _FIELDS[name] for name in required}
