"""The net beneath keyed draws: what no trace shows, the generators do.

Generators belong to the whole process, so a thread that reads data or writes logs may move them, too.  Where such
threads are alive, a forward's own draws are told from theirs: torch's by a dispatch mode and Python's by a profile
function, both of which see their own thread alone, and numpy's by holding its generator's lock, for which other threads
wait.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._guards import detect_fake_mode  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.errors import PlanError
from weft.model.seeding import others_draw
from weft.techniques.core._context import StepContext


@dataclass(frozen=True, slots=True)
class Generators:
    """State of all generators that a model can draw from without saying so."""

    torch: bytes
    device: bytes
    python: object
    numpy: object

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        kind, words, *rest = np.random.get_state()
        own = b"" if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device).numpy().tobytes()
        return cls(
            torch.get_rng_state().numpy().tobytes(),
            own,
            random.getstate(),
            (kind, hashlib.blake2b(words.tobytes()).digest(), *rest),  # pyright: ignore[reportAttributeAccessIssue]
        )

    def moved(self, later: Generators) -> str:
        """Whose generator has moved, torch's last; empty: none."""
        if self.python != later.python:
            return "Python's random"
        if self.numpy != later.numpy:
            return "numpy's"
        return "torch's" if self.torch != later.torch or self.device != later.device else ""


@functools.cache
def _is_seeded(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def is_draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an ATen operator takes numbers from a generator."""
    # The tag is of the operator, and not of the call: dropout with p = 0 and evaluation draw nothing.
    if not _is_seeded(func):
        return False
    settings = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    settings |= kwargs
    if "dropout_p" in settings:
        return float(settings["dropout_p"]) > 0.0
    if "rrelu" in func.overloadpacket.__name__:
        return bool(settings.get("training", False))
    name = func.overloadpacket.__name__
    return not ("attention" in name or "sdp_choice" in name) and settings.get("train", True) is not False


class DrawMode(TorchDispatchMode):
    """Calls `answer` in place of operators that draw, and runs the others."""

    def __init__(self, answer: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        return self._answer(func, args, keywords) if is_draw(func, args, keywords) else func(*args, **keywords)


class _OwnTorch(TorchDispatchMode):
    """Sees this thread draw from torch's global generators."""

    supports_higher_order_operators = True  # compiled recomputation has some, which draw nothing of their own

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled blocks run compiled: else torch runs them eagerly, and says nothing.  They draw nothing (what
        would is refused), so nothing of theirs has to be seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        if keywords.get("generator") is None and is_draw(func, args, keywords):
            self.drew |= not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(result))
        return result


class OwnPython:
    """Sees this thread call Python's global generator; where a profiler is at work already, whoever moved it counts."""

    def __init__(self) -> None:
        self.drew = False
        """Whether this thread drew since the flag was last cleared."""
        self._global: Any = getattr(random, "_inst")  # noqa: B009  # what the module's functions are bound to
        self.is_busy = sys.getprofile() is not None

    def __enter__(self) -> None:
        if self.is_busy:
            self.drew = True
        else:
            sys.setprofile(self._called)

    def __exit__(self, *unused: object) -> None:
        if not self.is_busy:
            sys.setprofile(None)

    def _called(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is self._global:
            self.drew |= function.__name__ not in ("getstate", "setstate")


@dataclass(slots=True)
class DrawWatch:
    """Whose generator the code within `watched` has moved; empty: none.  Known at its end."""

    whose: str = ""


@contextmanager
def watched(device: torch.device) -> Generator[DrawWatch]:
    """Tell the draws of this thread from those of others."""
    watch = DrawWatch()
    if not others_draw():
        before = Generators.now(device)
        yield watch
        watch.whose = before.moved(Generators.now(device))
        return
    # Another thread may move the same global generators (a loader's): then a mode and a profiler tell whether this
    # thread drew, and numpy is locked meanwhile.
    own_torch, own_python = _OwnTorch(), OwnPython()
    with ExitStack() as stack:
        lock = numpy_lock()
        if lock is not None:
            stack.enter_context(lock)
        before = Generators.now(device)
        with own_torch, own_python:
            yield watch
        after = Generators.now(device)
    watch.whose = before.moved(
        Generators(
            torch=after.torch if own_torch.drew else before.torch,
            device=after.device if own_torch.drew else before.device,
            python=after.python if own_python.drew else before.python,
            numpy=after.numpy,
        )
    )


def numpy_lock() -> Any:
    """The lock of numpy's global generator, which it takes for every draw; None before numpy 2.4, whose lock a thread
    cannot take twice: there whoever moved it counts."""
    lock: Any = getattr(np.random, "get_bit_generator")().lock  # noqa: B009  # numpy's stubs lack it
    return lock if isinstance(lock, type(threading.RLock())) else None


_BY_MODULES = (
    "Draw by nn.Dropout modules or by torch functions that every forward calls, or train on one process with the whole"
    " batch in one microbatch."
)


@contextmanager
def without_draws(context: StepContext, device: torch.device, what: str, instead: str = _BY_MODULES) -> Generator[None]:
    """Refuse a forward or a loss that has moved a generator: such a draw has no key.  `instead` says what to write.

    Raises:
        PlanError: it has, and the plan is not one process with the whole batch at once.
    """
    if context.is_alone or detect_fake_mode() is not None:  # a dry run draws nothing
        yield
        return
    with watched(device) as watch:
        yield
    if watch.whose:
        unseen = f" ({context.unseen})" if context.unseen else ""
        raise PlanError(
            f"{what} drew from {watch.whose} generator where no trace of it showed a draw{unseen}, so its numbers have"
            f" no key and plans would differ. {instead}"
        )
