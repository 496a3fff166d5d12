"""Errors of torch that come of a loop's treating a rank's share of a model as the whole of it, in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

import weft.errors
from weft.api.guards import watched_parameters
from weft.config.plan import Plan
from weft.errors import RecipeError, WeftError


def explain_share(error: BaseException, models: Iterable[tuple[nn.Module, Plan]]) -> RecipeError | None:
    """Return what to say of an error that came out of the loop's own code, where a function that failed was given a
    model, or parameters of it, that a plan cuts or holds in another dtype; None where there is nothing to say."""
    if isinstance(error, AssertionError | TypeError) and _NO_COPY.search(str(error)):
        return _of_copies(error, models)
    if isinstance(error, RuntimeError) and "Creating a Parameter from an instance" in str(error):
        return RecipeError(
            "nn.Parameter was given a parameter of the model after session.prepare, as parametrizations (weight_norm)"
            " do: the plan trains those that prepare was given. Parametrize the model before prepare; for a copy write"
            " nn.Parameter(parameter.detach().clone())."
        )
    if isinstance(error, AttributeError | KeyError):
        return _of_stages(error, models)
    if isinstance(error, AssertionError):
        return _of_full_tensors(error, models)
    if isinstance(error, WeftError) or not isinstance(
        error, RuntimeError | TypeError | ValueError | NotImplementedError
    ):
        return None
    if not _OF_SHARES.search(str(error)):
        return None
    changed = [(model, how) for model, plan in models if (how := _how(plan))]
    frames = _frames(error)
    if not changed or not frames or any(_file(frame).startswith(_HERE) for frame in frames[1:] if _is_called(frame)):
        return None
    for model, how in changed:
        names = {id(module): name for name, module in model.named_modules()}
        names |= {id(parameter): name for name, parameter in model.named_parameters()}
        public = [frame for frame in frames if not frame.f_code.co_name.startswith("_")]
        for frame in reversed(public or frames):
            values = [value for local in frame.f_locals.values() for value in _flat(local)]
            if any(id(value) in names for value in values) and "weft" not in frame.f_globals.get("__name__", "").split(
                "."
            ):
                said = next(iter(str(error).splitlines()), type(error).__name__)
                if "sharded" in said:
                    return RecipeError(
                        f"{frame.f_code.co_name} was given parameters of the model after session.prepare, {how}, and"
                        f" torch cannot do this with shares ({said}). Gather each first (parameter.full_tensor()), or"
                        " use data_parallel.zero = 0, 1 or 2."
                    )
                return RecipeError(
                    f"{frame.f_code.co_name} was given parameters of the model after session.prepare, {how}, beside"
                    f" tensors that were made for the whole ({said}). Make averages and copies of the model after"
                    " prepare, of state.model.parameters(), or of what state.export has written."
                )
    return None


def _of_copies(error: BaseException, models: Iterable[tuple[nn.Module, Plan]]) -> RecipeError | None:
    """Explain an error of a model with shares, or with groups of processes, that somebody copies."""
    cut = {id(module) for model, plan in models if _how(plan) for module in model.modules()}
    copies = [frame for frame in _frames(error) if _file(frame).endswith("copy.py")]
    if not any(id(value) in cut for frame in copies for value in frame.f_locals.values()):
        return None
    return RecipeError(
        "copy.deepcopy (which AveragedModel calls, too) was given a model after session.prepare of which this plan"
        " gives a rank a share. Average its parameters, [p.detach().clone() for p in state.model.parameters()], or"
        " use data_parallel.zero = 0, 1 or 2 and mesh.tensor = 1, which leave weights whole."
    )


def _of_stages(error: BaseException, models: Iterable[tuple[nn.Module, Plan]]) -> RecipeError | None:
    """Explain an error of a loop that reads or writes an attribute of a module which another pipeline stage has."""
    stages = [model for model, plan in models if plan.mesh.pipeline > 1]
    names = {id(module): name for model in stages for name, module in model.named_modules() if _stands_in(module)}
    used = next((frame for frame in _frames(error) if id(frame.f_locals.get("self")) in names), None)
    if used is None:
        return None
    said = str(next(iter(error.args), ""))
    return RecipeError(
        f"the loop has used {names[id(used.f_locals['self'])]} of the model after session.prepare, and this plan gives"
        f" it to another rank: {said}. Take the modules and parameters that state.model has on this rank (loop over"
        " state.model.named_parameters()), or use mesh.pipeline = 1."
    )


def _of_full_tensors(error: AssertionError, models: Iterable[tuple[nn.Module, Plan]]) -> RecipeError | None:
    """Explain an error of torch's own check of tensors that meet shares, which has no message."""
    frames = _frames(error)
    is_of_torch = "/torch/distributed/tensor/" in (_file(frames[-1]) if frames else "")
    if not is_of_torch or not any(plan.data_parallel.shards_weights for _, plan in models):
        return None
    own = next((frame for frame in reversed(frames) if "/torch/" not in _file(frame)), frames[0])
    if _file(own).startswith(_HERE):
        return None
    return RecipeError(
        f"{own.f_code.co_name} has brought what was computed of shares of weights together with a tensor that is whole."
        " Gather it first (value.full_tensor()), on every rank, or use data_parallel.zero = 0, 1 or 2."
    )


def _stands_in(module: nn.Module) -> bool:
    return type(module).__module__.startswith("weft.techniques.pipeline.")


_NO_COPY = re.compile("does not support deepcopy|cannot pickle")
_OF_SHARES = re.compile("DTensor|sharded|tensor subclasses|size of tensor|shape|dtype|same size", re.IGNORECASE)
"""Errors of torch where tensors of other kinds, sizes or dtypes meet."""
_HERE = weft.errors.__file__.rpartition("/")[0]


def _how(plan: Plan) -> str:
    mesh = plan.mesh
    if plan.data_parallel.shards_weights or mesh.tensor > 1 or mesh.pipeline > 1:
        return "of which this plan gives a rank a share"
    narrow = plan.compute.precision
    return f"which this plan holds in {narrow}" if narrow in ("bf16", "fp16") else ""


def _frames(error: BaseException) -> list[Any]:
    """Frames from the loop's own to where it failed, or where a function was called for tensors that tell of it."""
    frames: list[Any] = []
    trace = error.__traceback__
    while trace is not None and not (frames and _file(trace.tb_frame) == watched_parameters.__file__):
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    while frames and _file(frames[0]).startswith((_HERE, "<")) or (frames and "contextlib" in _file(frames[0])):
        frames.pop(0)  # of the session, which the error passes through
    return frames


def _is_called(frame: Any) -> bool:
    return "contextlib" not in _file(frame)


def _file(frame: Any) -> str:
    return str(frame.f_code.co_filename)


def _flat(value: Any) -> list[Any]:
    return [value, *value] if isinstance(value, list | tuple) and len(value) < 1 << 16 else [value]  # pyright: ignore[reportUnknownVariableType]
