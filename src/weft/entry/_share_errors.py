"""Errors of torch that come of a loop's treating a rank's share of a model as the whole of it, in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from weft.errors import RecipeError, WeftError
from weft.plan import Plan


def explain_share(error: BaseException, models: Iterable[tuple[nn.Module, Plan]]) -> RecipeError | None:
    """Return what to say of an error that came out of the loop's own code, where a function that failed was given a
    model, or parameters of it, that a plan cuts or holds in another dtype; None where there is nothing to say."""
    if isinstance(error, AssertionError) and "does not support deepcopy" in str(error):
        return RecipeError(
            "copy.deepcopy (which AveragedModel calls, too) was given a model after session.prepare of which this plan"
            " gives a rank a share. Average its parameters, [p.detach().clone() for p in state.model.parameters()], or"
            " use data_parallel.zero = 0, 1 or 2, which leave weights whole."
        )
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
        names = {id(each): name for name, each in model.named_modules()}
        names |= {id(each): name for name, each in model.named_parameters()}
        for frame in reversed(frames):
            held = [value for local in frame.f_locals.values() for value in _flat(local)]
            if any(id(value) in names for value in held) and "weft" not in frame.f_globals.get("__name__", "").split(
                "."
            ):
                said = next(iter(str(error).splitlines()), type(error).__name__)
                return RecipeError(
                    f"{frame.f_code.co_name} was given parameters of the model after session.prepare, {how}, beside"
                    f" tensors that were made for the whole ({said}). Make averages and copies of the model after"
                    " prepare, of state.model.parameters(), or of what state.export has written."
                )
    return None


_OF_SHARES = re.compile("DTensor|size of tensor|shape|dtype|same size", re.IGNORECASE)
"""What torch says where tensors of other kinds, sizes or dtypes meet."""
_HERE = __file__.rpartition("/entry/")[0]


def _how(plan: Plan) -> str:
    mesh = plan.mesh
    if plan.data_parallel.shards_weights or mesh.tensor > 1 or mesh.pipeline > 1:
        return "of which this plan gives a rank a share"
    narrow = plan.compute.precision
    return f"which this plan holds in {narrow}" if narrow in ("bf16", "fp16") else ""


def _frames(error: BaseException) -> list[Any]:
    """Frames from the loop's own to where it failed."""
    found: list[Any] = []
    trace = error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    while found and _file(found[0]).startswith((_HERE, "<")) or (found and "contextlib" in _file(found[0])):
        found.pop(0)  # of the session, which the error passes through
    return found


def _is_called(frame: Any) -> bool:
    return "contextlib" not in _file(frame)


def _file(frame: Any) -> str:
    return str(frame.f_code.co_filename)


def _flat(value: Any) -> list[Any]:
    return [value, *value] if isinstance(value, list | tuple) and len(value) < 1 << 16 else [value]  # pyright: ignore[reportUnknownVariableType]
