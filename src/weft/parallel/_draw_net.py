"""The net beneath keyed draws: what no trace shows, the generators do."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch._guards import detect_fake_mode  # pyright: ignore[reportPrivateImportUsage]

from weft.errors import PlanError
from weft.parallel._context import StepContext


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
        """Whose generator has moved; empty: none."""
        if self.torch != later.torch or self.device != later.device:
            return "torch's"
        if self.python != later.python:
            return "Python's random"
        return "numpy's" if self.numpy != later.numpy else ""


@contextmanager
def without_draws(context: StepContext, device: torch.device, what: str) -> Generator[None]:
    """Refuse a forward or a loss that has moved a generator: such a draw has no key.

    Raises:
        PlanError: it has, and the plan is not one process with the whole batch at once.
    """
    if context.is_alone or detect_fake_mode() is not None:  # a dry run draws nothing
        yield
        return
    before = Generators.now(device)
    yield
    whose = before.moved(Generators.now(device))
    if whose:
        unseen = f" ({context.unseen})" if context.unseen else ""
        raise PlanError(
            f"{what} drew from {whose} generator where no trace of it showed a draw{unseen}, so its numbers have no"
            " key and plans would differ. Draw by nn.Dropout modules or by torch functions that every forward calls,"
            " or train on one process with the whole batch in one microbatch."
        )
