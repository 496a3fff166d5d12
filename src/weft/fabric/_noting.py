"""Callbacks and loggers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from weft.errors import RecipeError
from weft.fabric._place import FabricPlace


class ScriptNotes(FabricPlace):
    """Loggers and callbacks of a script."""

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger."""
        if not self._loggers:
            raise RecipeError("this Fabric has no logger. Give it one: Fabric(loggers=CSVLogger(…)).")
        return self._loggers[0]

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Give a number to all loggers."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Give numbers to all loggers."""
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        for logger in self._loggers:
            logger.log_metrics(metrics=plain, step=step)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        for method in [getattr(callback, hook_name, None) for callback in self._callbacks]:
            if callable(method):
                taken = inspect.signature(method).parameters
                takes_all = any(value.kind is inspect.Parameter.VAR_KEYWORD for value in taken.values())
                method(*args, **{name: value for name, value in kwargs.items() if takes_all or name in taken})
