"""Importing what a recipe names as `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from weft.errors import RecipeError, did_you_mean


def import_attribute(setting: str, path: str) -> Callable[..., Any]:
    """Import `package.module:function` and return the function.

    `setting` names where the recipe says so, for messages.

    Raises:
        RecipeError: no colon in the path, no such module, one that fails, no such name in it, or nothing callable.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise RecipeError(
            f'{setting} = "{path}" is not of the form module:function, such as "my_package.models:build".'
        )
    module = _import_module(setting, path, module_name)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [name for name in dir(value) if not name.startswith("_")]
            raise RecipeError(f'{setting} = "{path}": {module_name} has no {attribute}.{did_you_mean(part, names)}')
        value = getattr(value, part)
    if not callable(value):
        raise RecipeError(f'{setting} = "{path}" is a {type(value).__name__}, which cannot be called. Name a function.')
    return value


def _import_module(setting: str, path: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        missing = problem.name or ""
        if name == missing or name.startswith(missing + "."):
            raise RecipeError(
                f'{setting} = "{path}": there is no module {missing}.'
                " Install its package, or put the folder that holds it on PYTHONPATH."
            ) from None
        raise RecipeError(
            f'{setting} = "{path}": importing {name} needs the module {missing}, which is not installed. Install it.'
        ) from problem
    except Exception as problem:
        raise RecipeError(
            f'{setting} = "{path}": importing {name} raised {type(problem).__name__}: {problem}.'
            f" Make `python -c 'import {name}'` work first."
        ) from problem
