"""Numbers of the calls of modules that draw, within the forward of one microbatch.

A module that is called twice draws twice: its draws are keyed by its name and by the number of the call.  A forward
that runs again in the backward (recomputation, `torch.utils.checkpoint` in a user's own code) must draw what it drew at
first, whatever has been called since.  So what ran within a checkpoint is noted under it, and a second run reads the
numbers of the first.  Torch says nowhere which checkpoint runs: its frames on the stack do (3 µs for 40 frames).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint as checkpoints

from weft.errors import PlanError

_GLOBALS = vars(checkpoints)


class _Checkpoint(NamedTuple):
    """A checkpoint within which a module is called."""

    own: Any
    """Torch's object for it: the same one when its function runs again."""
    is_again: bool
    """Whether its function runs again, for the backward."""


class _Noted:
    """Calls within one checkpoint, in order, by module."""

    def __init__(self) -> None:
        self.numbers: defaultdict[str, list[int]] = defaultdict(list)
        self.read: defaultdict[tuple[int, str], int] = defaultdict(int)
        """Number of the calls that its second run has read, by backward and module."""


class CallNumbers:
    """The numbers of one forward; the same object must be at hand in its backward."""

    def __init__(self) -> None:
        self._called: defaultdict[str, int] = defaultdict(int)
        self._within: WeakKeyDictionary[Any, _Noted] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[CallNumbers], tuple[()]]:
        """A copy of a state begins anew: checkpoints are of the process and the graph in which they are."""
        return CallNumbers, ()

    def restart(self) -> None:
        """Begin anew, for another forward of the same microbatch."""
        self._called.clear()
        self._within.clear()

    def take(self, key: str) -> int:
        """Return the number of the call of `key` that begins now: 0, 1, …, or in a second run that of the first.

        Raises:
            PlanError: a module that was called several times runs again, and nothing says which of its calls it is.
        """
        around = _checkpoints_around()
        # The innermost that runs again says it; what is within that one runs for the first time.
        inner = next((place for place, checkpoint in enumerate(around) if checkpoint.is_again), len(around))
        if inner < len(around):
            number = self._again(around[inner].own, key)
        elif torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
            number = self._in_backward(key)
        else:
            number = self._called[key]
            self._called[key] += 1
        for checkpoint in around[:inner]:
            self._within.setdefault(checkpoint.own, _Noted()).numbers[key].append(number)
        return number

    def _again(self, own: Any, key: str) -> int:
        noted = self._within.setdefault(own, _Noted())
        backward = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        place = noted.read[backward, key]
        noted.read[backward, key] += 1
        numbers = noted.numbers[key]
        if place < len(numbers):
            return numbers[place]
        return self._in_backward(key)

    def _in_backward(self, key: str) -> int:
        if self._called[key] <= 1:
            return 0
        raise PlanError(
            f"{key} draws, was called {self._called[key]} times in the forward, and runs again in the backward where"
            " nothing says which of these calls is repeated. Recompute by torch.utils.checkpoint, by"
            ' plan.memory.recompute = "full", or not at all.'
        )


def numbered(key: str, number: int) -> str:
    """Return the key of the draws of a module in a call with this number; that of the first is the module's own."""
    return f"{key}\0\0{number}" if number else key


def _checkpoints_around() -> list[_Checkpoint]:
    """The checkpoints that the caller runs in, the innermost first."""
    checkpoints: list[_Checkpoint] = []
    frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # what `inspect` and `logging` use
    while frame is not None:
        if frame.f_globals is _GLOBALS and (known := _checkpoint_of(frame)) is not None:
            checkpoints.append(known)
        frame = frame.f_back
    return checkpoints


def _checkpoint_of(frame: Any) -> _Checkpoint | None:
    name, variables = frame.f_code.co_name, frame.f_locals
    if name == "checkpoint" and "gen" in variables:
        within = variables["gen"].gi_frame
        own = None if within is None else within.f_locals.get("new_frame")
        return None if own is None else _Checkpoint(own, is_again=False)
    if name == "unpack_hook":
        return _Checkpoint(variables["frame"], is_again=True)
    if name in ("forward", "backward") and "ctx" in variables:  # of torch's older form, `use_reentrant=True`
        return _Checkpoint(variables["ctx"], is_again=name == "backward")
    return None
