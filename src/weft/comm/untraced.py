"""Keeps Dynamo out of what C++ calls back: process groups and works in Python."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

T = TypeVar("T", bound=type[Any])


def untraced(kind: T) -> T:
    """Let `torch.compile` pass by the methods of a class, and what they call, as it passes by Gloo's C++.

    While a compiled function runs, Dynamo looks at every frame of Python that begins, those too that C++ begins: where
    DDP sends its buffers, that is the middle of a collective.  Costs nothing at a call.
    """
    skip = eval_frame._FrameAction.SKIP  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
    strategy = eval_frame._FrameExecStrategy(skip, skip)  # pyright: ignore[reportPrivateUsage]
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            eval_frame.set_code_exec_strategy(method.__code__, strategy)
            method.__dict__["_torchdynamo_disable"] = True  # and calls that it traces: `work.wait()` breaks the graph
    return kind
