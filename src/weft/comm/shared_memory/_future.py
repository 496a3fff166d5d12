"""Futures as C++ wants them: of a list of tensors, or followed by something in the state of the thread that launched.

A `Future` that Python makes holds a Python object, which most of torch takes; DDP's built-in hook for fp16 insists on
the list of tensors that a backend in C++ gives.  TorchScript has futures with a type, and its `fork` waits for another
future without holding a thread, and goes on in the state (that of the profiler, too) of the thread that called it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

_OPERATORS = torch.library.Library("weft", "FRAGMENT")  # lives as long as this module
_OPERATORS.define("tensors_of(Any outcome) -> Tensor[]")
_OPERATORS.define("end_of_collective(Any end) -> bool")


def _tensors_of(outcome: Any) -> list[Tensor]:
    """The value of a future; an error takes its place where there is one (`Future.set_exception`)."""
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _end_of_collective(end: Callable[[], None]) -> bool:
    end()
    return True


_OPERATORS.impl("tensors_of", _tensors_of, "CompositeExplicitAutograd")
_OPERATORS.impl("end_of_collective", _end_of_collective, "CompositeExplicitAutograd")

_SOURCE = """
def wait_for_tensors(given: Future[Any]) -> List[Tensor]:
    return torch.ops.weft.tensors_of(torch.jit._wait(given))

def with_type(given: Future[Any]) -> Future[List[Tensor]]:
    return torch.jit._fork(wait_for_tensors, given)

def wait_to_end(given: Future[Any]) -> bool:
    return torch.ops.weft.end_of_collective(torch.jit._wait(given))

def ending(given: Future[Any]) -> Future[bool]:
    return torch.jit._fork(wait_to_end, given)
"""


@functools.cache
def _script() -> Any:
    return torch.jit.CompilationUnit(_SOURCE)


def of_tensors(future: Future[Any]) -> Future[Any]:
    """Return a future of a list of tensors, in C++ too, that is completed when `future` is (30 µs)."""
    return _script().with_type(future)


def ending(future: Future[Any]) -> Future[Any]:
    """Return a future that is completed when the function that is the value of `future` has been called, on a thread of
    TorchScript that has the state of this one."""
    return _script().ending(future)
