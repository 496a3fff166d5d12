"""Check the arguments of `weft.session`, `prepare` and a state's methods, where they are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import nn

from weft.api.batches.batch_shape import BatchShape
from weft.config.recipe import SplitKind
from weft.errors import DataError, LaunchError, PlanError, RecipeError, did_you_mean
from weft.model.families import CutTable, SplitRule
from weft.model.patterns import require_matches
from weft.run.data.preparation import path_of

_DEVICES = ("auto", "cpu", "cuda")


def check_session(
    permit: object, compression: object, settings: object, device: object, track: object, **switches: object
) -> None:
    """Check the arguments of `weft.session` that nothing else checks."""
    for name, value in (("permit", permit), ("compression", compression)):
        if isinstance(value, str):
            raise RecipeError(f"{name} = {value!r} is one text, not a list of them. Write {name}=({value!r},).")
        if not isinstance(value, Sequence):
            raise RecipeError(f"{name} = {value!r} is no list of names. Write, for example, {name}=('bf16',).")
    if settings is not None:
        _check_settings(settings)
    if not isinstance(device, str) or device not in _DEVICES:
        known = " or ".join(f'"{device_name}"' for device_name in _DEVICES)
        raise PlanError(f"weft.session(device=…) = {device!r} is no device of a job. Give {known}.")
    if track is not None and not callable(track):
        raise RecipeError(
            f"track = {track!r} cannot be called. Give a function of (name, value, step), such as"
            " SummaryWriter(…).add_scalar."
        )
    for name, value in switches.items():
        if type(value) is not bool:
            raise RecipeError(f"{name} = {value!r} is neither True nor False. Give one of them.")


def _check_settings(settings: object) -> None:
    if not isinstance(settings, Mapping):
        raise PlanError(
            f"weft.session(settings=…) is a {type(settings).__name__}. Give a dictionary, such as"
            ' {"data_parallel.zero": 3}.'
        )
    for key, value in cast(Mapping[Any, Any], settings).items():
        if not isinstance(key, str):
            raise PlanError(
                f"weft.session(settings=…): the key {key!r} is a {type(key).__name__}. Write the setting's name as a"
                ' text, such as "data_parallel.zero".'
            )
        if isinstance(value, Mapping):
            inner = next(iter(cast(Mapping[Any, Any], value)), "…")
            raise PlanError(
                f"weft.session(settings=…): {key} is a whole section, which would set back what else is in it. Write"
                f' its settings one by one: {{"{key}.{inner}": …}}.'
            )


def run_folder_of(folder: object) -> Path | None:
    """Return the folder that a session was given; it may be there, and may not be a file."""
    if folder is None:
        return None
    path = path_of("weft.session(folder=…)", folder, LaunchError)
    try:
        is_other = path.exists() and not path.is_dir()
    except OSError:
        return path  # which making it will say
    if is_other:
        raise LaunchError(f"weft.session(folder=…): {path} is a file, and a run needs a folder. Give another name.")
    return path


def check_prepared(
    model: object, optimizer: object, loss: object, split: object, cut: object, vocabulary_head: object
) -> None:
    """Check the arguments of `prepare` that nothing else checks."""
    if not isinstance(model, nn.Module):
        made = f"the class {model.__name__}. Give an instance: " if isinstance(model, type) else f"a {_kind(model)}, "
        raise RecipeError(f"session.prepare was given {made}the model, an nn.Module, comes first.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = optimizer.__name__ if isinstance(optimizer, type) else _kind(optimizer)
        fix = (
            "Give scheduler.optimizer, and go on calling scheduler.step() after state.step()."
            if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler)
            else "Give one of torch.optim, made over model.parameters(), such as torch.optim.AdamW(model.parameters())."
        )
        raise RecipeError(f"the optimizer that session.prepare was given is {kind}, not an optimizer. {fix}")
    _check_loss(loss)
    _check_split(split, model)
    if cut is not None and not isinstance(cut, CutTable):
        raise RecipeError(
            f"cut = {cut!r} is no CutTable. Write CutTable(entry=…, blocks=(…), tail=(…)), or leave it out."
        )
    names = [name for name, _ in model.named_modules() if name]
    if vocabulary_head is not None and vocabulary_head not in names:
        raise RecipeError(
            f"vocabulary_head = {vocabulary_head!r} names no module of the {_kind(model)}."
            f"{did_you_mean(str(vocabulary_head), names) or ' Give the name of its head, or leave it out.'}"
        )


def refuse_without_loss(arguments: Mapping[str, object]) -> None:
    """Refuse arguments of `prepare` that only mean something with a loss."""
    for name, value in arguments.items():
        if value is None:
            continue
        if name == "ledger":
            raise RecipeError(
                "weft.session(ledger=True) knows the samples of steps by state.step(batch) alone. Give session.prepare"
                " a loss=, or leave ledger= out."
            )
        fix = {
            "max_grad_norm": "Call session.clip_grad_norm_(model, …) before optimizer.step()",
            "batch_size": "Leave it out: the loader's batches say it",
        }.get(name, "Leave it out: the loop calls the model itself")
        raise RecipeError(
            f"session.prepare(…, {name}=…) belongs to a loss that the session calls, and none was given. {fix}; or give"
            " loss=, and train by state.step(batch)."
        )


def _check_loss(loss: object) -> None:
    if not callable(loss):
        raise RecipeError(f"loss = {loss!r} cannot be called. Give a function of (outputs, batch).")
    if getattr(loss, "__module__", type(loss).__module__) in ("torch.nn.modules.loss", "torch.nn.functional"):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise RecipeError(
            f"{name} takes (outputs, targets), and session.prepare's loss is called with (outputs, batch). Write"
            " loss=lambda outputs, batch: (loss_fn(outputs, batch[1]) * len(outputs), len(outputs)), with what your"
            " batch has in place of batch[1]."
        )
    try:
        inspect.signature(cast(Callable[..., Any], loss)).bind(None, None)
    except ValueError:
        return  # one that nobody can look at
    except TypeError as problem:
        raise RecipeError(f"the loss is called with (outputs, batch), and it does not take them: {problem}.") from None


def _check_split(split: object, model: nn.Module) -> None:
    kinds, rules = get_args(SplitKind), cast(Any, split)
    if isinstance(split, Mapping):
        rules = list(cast(Mapping[Any, Any], split).items())
    elif isinstance(split, str) or not isinstance(split, Sequence):
        raise RecipeError(f'split = {split!r} is no table. Write {{"name of a module": "column"}}, or leave it out.')
    known = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    for rule in rules:
        match, kind = (rule.match, rule.kind) if isinstance(rule, SplitRule) else _pair(rule)
        if kind not in kinds:
            raise RecipeError(
                f"split: {match!r} is to split as {kind!r}, which is no way of it."
                f"{did_you_mean(str(kind), kinds) or ' Known are ' + ', '.join(kinds) + '.'}"
            )
        require_matches("session.prepare(split=…)", match, known, "module")


def _pair(rule: object) -> tuple[str, object]:
    if isinstance(rule, tuple) and len(cast(tuple[Any, ...], rule)) == 2 and isinstance(rule[0], str):
        return cast(tuple[str, object], rule)
    raise RecipeError(f'split holds {rule!r}. Write {{"name of a module": "column"}}, or SplitRule(match=…, kind=…).')


def check_inputs(inputs: object, model: nn.Module, shape: BatchShape) -> None:
    """Check `prepare`'s inputs: which argument of the forward takes which field of the batch."""
    known, kind = shape.names, _kind(model)
    if not isinstance(inputs, Mapping):
        raise RecipeError(
            f"inputs = {inputs!r} does not say which field goes where. Write inputs={{argument of forward: field}},"
            f' such as {{"x": "{known[0]}"}}.'
        )
    parameters = inspect.signature(model.forward).parameters.values()
    named = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for name, field in cast(Mapping[Any, Any], inputs).items():
        if not isinstance(name, str) or not name.isidentifier() or not (takes_any or name in named):
            raise RecipeError(
                f"inputs names {name!r}, which cannot be an argument of {kind}.forward({', '.join(named)})."
                f"{did_you_mean(str(name), named) or ' Give one of these.'}"
            )
        if not (isinstance(field, str) and shape.has(field)):
            if not isinstance(field, str) and str(field) in known:
                raise RecipeError(
                    f'inputs takes {field!r} for {name}. Write the field as a text: {{"{name}": "{field}"}}.'
                )
            # Another field than the loader's may be of a batch that the loop makes itself (a critic's).
            meant = did_you_mean(str(field), [name for name in known if name not in inputs.values()])
            if meant or not isinstance(field, str) or field.isdecimal():
                raise RecipeError(
                    f"inputs takes {field!r} for {name}, and the loader's batch has no such field: it has"
                    f" {', '.join(known)}.{meant or ' Give one of these.'}"
                )


def integer_or_none(what: str, value: object) -> int | None:
    """Return a whole number from 0 on, or None; refuse all else."""
    if value is not None and (type(value) is not int or value < 0):
        raise RecipeError(f"{what} = {value!r} is no number of them. Give a whole number from 0 on, or leave it out.")
    return value


def check_draw(what: str, shape: tuple[object, ...], low: object = 0, high: object = 1) -> tuple[int, ...]:
    """Return the shape.  Refuse what is none of numbers for every sample, and bounds that have no number between."""
    for size in shape:
        if type(size) is not int or size < 0:
            inner = ", ".join(map(str, cast(tuple[Any, ...], size))) if isinstance(size, tuple) else "2, 3"
            raise RecipeError(
                f"{what} was asked for a shape with {size!r}, which is no size. Give whole numbers, one argument for"
                f" each dimension: {what}(batch, {inner})."
            )
    for bound in (low, high):
        if type(bound) is not int or not -(2**63) <= bound < 2**63:
            raise DataError(f"randint was given the bound {bound!r}. Give whole numbers of 64 bits.")
    if cast(int, high) <= cast(int, low):
        raise DataError(f"randint from {low} to {high} − 1: there is no such number. Give a high above low.")
    return cast(tuple[int, ...], shape)


def _kind(value: object) -> str:
    return type(value).__name__
