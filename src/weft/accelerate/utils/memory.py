"""Memory: what is let go, and batches that fit."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the device's free memory back."""
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def release_memory(*objects: Any) -> list[Any]:
    """Return as many `None`, and give memory back."""
    clear_device_cache(garbage_collection=True)
    return [None for _ in objects]


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether it says that memory is short."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    text = str(exception).lower()
    return isinstance(exception, RuntimeError | MemoryError) and any(pattern in text for pattern in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Call a function with a smaller batch size, its first argument, until memory is enough.

    The batch is the global one, so that a smaller one is another training.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        names = inspect.signature(function).parameters
        if len(names) < len(args) + 1:
            raise TypeError(
                f"{function.__name__} has no room for its batch size, which is put before what it is given."
            )
        while size > 0:
            clear_device_cache(garbage_collection=True)
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            size = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(size * 0.9)
        raise RuntimeError(f"memory is too short for a batch of one sample in {function.__name__}.")

    return called
