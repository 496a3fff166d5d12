"""The one family of errors that Weft raises for what a user can change.

Every message says what is wrong with values, why, and the computed change to make.  Programming mistakes
inside Weft are plain assertions; they never use these classes.
"""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BadSetting",
    "CheckpointError",
    "ClusterError",
    "CollectiveError",
    "DataError",
    "LaunchError",
    "NotFiniteError",
    "PlanError",
    "RecipeError",
    "ReplicaError",
    "WeftError",
    "did_you_mean",
]


@dataclass(frozen=True, slots=True)
class BadSetting:
    """The setting an error is about, in parts, so that a loader can add its file, its line, or where it came from."""

    path: tuple[str | int, ...]
    """Names (and positions in lists) from the object that raised the error down to the setting."""
    value: str | None
    """The value as TOML spells it; None when the setting itself is missing or unknown."""
    problem: str
    """Rest of the sentence, and the change to make."""


class WeftError(Exception):
    """Base of every error a user can act on.  The command line prints it as one paragraph and exits with its status."""

    def __init__(self, message: str = "", *, setting: BadSetting | None = None, status: int = 2) -> None:
        """`status` is 2 for input that can be mended, 1 for what failed in spite of good input."""
        super().__init__(message)
        self.setting = setting
        self.status = status

    def lines_of_user(self) -> list[str]:
        """Return the lines of the user's own code that led to this error: file, line and its text; empty where none
        did."""
        others = ("<frozen", "<string>", os.path.dirname(os.__file__), os.path.dirname(__file__))
        for frame in reversed(traceback.extract_tb(self.__traceback__)):
            if not frame.filename.startswith(others) and "site-packages" not in frame.filename:
                return [f"  {frame.filename}, line {frame.lineno}, in {frame.name}", f"    {frame.line}"]
        return []

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython prints in a notebook: the one that every other place prints, without Weft's own
        calls."""
        return [f"{type(self).__name__}: {self}", *self.lines_of_user()]


class RecipeError(WeftError):
    """The recipe asks for something that does not exist or cannot be."""


class PlanError(WeftError):
    """The plan does not fit the recipe or the cluster, or joins techniques that cannot compose."""


class ClusterError(WeftError):
    """The cluster description is wrong, or the machine is not what it says."""


class LaunchError(WeftError):
    """Ranks could not be started, or one of them stopped."""


class CollectiveError(WeftError):
    """A collective failed, timed out, or was called differently on different ranks."""

    def __init__(
        self, message: str = "", *, advice: str = "", setting: BadSetting | None = None, status: int = 2
    ) -> None:
        """`advice` is for a program that forms its groups itself; it follows the message."""
        super().__init__(f"{message} {advice}" if advice else message, setting=setting, status=status)
        self.fault = message
        """The message without the advice: for runs whose groups Weft forms, whose user could not follow it."""


class CheckpointError(WeftError):
    """A checkpoint is missing, torn, or does not fit the model."""


class DataError(WeftError):
    """The data are missing, empty, corrupt or outside the model's range."""


class NotFiniteError(WeftError):
    """The loss or a gradient is not finite in too many steps in a row, so that training cannot go on."""


class ReplicaError(WeftError):
    """Ranks that hold the same weights hold different ones."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return `" Did you mean X?"` for the closest choice, or an empty string when none is close."""
    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]}?" if matches else ""


def not_had(name: str, owner: str, instead: str) -> Any:
    """Return what stands for a name of another library that Weft has not: it may be imported, and says so when it is
    used.

    Args:
        owner: the module that it is asked of.
        instead: a sentence, the change to make.
    """
    return _NotHad(name, (), {"sentence": f"{name} is not had in {owner}. {instead}", "__module__": owner})


class _NotHad(type):
    """The class of such a name.  Called, or asked for anything, it raises `RecipeError`."""

    sentence: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RecipeError(cls.sentence)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        raise RecipeError(cls.sentence)
