"""Seeding torch's global generator for a while, without giving its numbers to other threads."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def others_draw() -> bool:
    """Whether threads are alive that may draw: any but this one and Weft's own.

    Threads that start later are started by what runs here, or by those.
    """
    me = threading.get_ident()
    return any(thread.ident != me and not thread.name.startswith("weft-") for thread in threading.enumerate())


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Seed the global CPU generator, and put its state back.

    The generator is the whole process's.  Where other threads are alive, a mode that sees this thread alone gives its
    operators a generator of their own with the same seed, which yields the same numbers.
    """
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        with _OfItsOwn() if others_draw() else nullcontext():
            yield
    finally:
        torch.set_rng_state(state)


_MARK = 0x57454654
"""Seed of the global generator while a mode stands in for it: any other was set meanwhile, the same one twice, too."""


class _OfItsOwn(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator()
        self._follow()

    def _follow(self) -> torch.Generator:
        """The generator, seeded anew where what runs below has seeded the global one (torch.manual_seed)."""
        if torch.initial_seed() != _MARK:
            self._generator.manual_seed(torch.initial_seed())
            torch.default_generator.manual_seed(_MARK)
        return self._generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or keywords.get("generator") is not None:
            return func(*args, **keywords)
        if any(argument.name == "generator" for argument in func._schema.arguments):
            call = func
        elif _has_generator(func.overloadpacket):
            call = func.overloadpacket
        else:
            return func(*args, **keywords)
        if not self._is_on_cpu(args, keywords):
            return func(*args, **keywords)
        return call(*args, **{**keywords, "generator": self._follow()})

    def _is_on_cpu(self, args: Any, given: Any) -> bool:
        first = next((value for value in args if isinstance(value, torch.Tensor)), None)
        device = first.device if first is not None else torch.device(given.get("device") or "cpu")
        return device.type == "cpu"


def _has_generator(packet: Any) -> bool:
    schemas = (getattr(packet, name)._schema for name in packet.overloads())
    return any(argument.name == "generator" for schema in schemas for argument in schema.arguments)
