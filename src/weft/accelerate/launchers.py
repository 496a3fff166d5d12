"""Ranks out of a running Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from weft.api import spawn


def notebook_launcher(
    function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int | None = None, **more: Any
) -> Any:
    """Call a function, which makes its Accelerator itself, on several processes; see `weft.spawn`."""
    return _spawned(function, args, num_processes or 1)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    """Call a function, which makes its Accelerator itself, on several processes; see `weft.spawn`."""
    return _spawned(function, args, num_processes)


def _spawned(function: Callable[..., Any], args: tuple[Any, ...], processes: int) -> Any:
    if processes == 1:
        return function(*args)
    return spawn(function, processes=processes, arguments=dict(inspect.signature(function).bind(*args).arguments))
