"""Draws taken out: what would be drawn is a constant, and every key that it would have had is noted.

A plan and plain PyTorch draw different numbers.  Within `quiet` both get the same constants in their place: 0.5 for a
uniform number, 0 for a normal one, and nothing is dropped.  So all else can be compared.  The notes say whether two
draws of one forward have had the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.techniques.core._context import StepContext
from weft.techniques.core._draw_net import is_draw
from weft.techniques.randomness._draw_values import keyed_value, shape_of_draw

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True, slots=True)
class Still:
    """Numbers (`_draw_values.Numbers`) that are all the same."""

    shape: torch.Size
    device: torch.device

    def uniform(self, salt: int = 0) -> Tensor:
        """fp64, 0.5."""
        del salt
        return torch.full(self.shape, 0.5, dtype=torch.float64, device=self.device)

    def normal(self) -> Tensor:
        """fp64, 0."""
        return torch.zeros(self.shape, dtype=torch.float64, device=self.device)

    def kept(self, probability: float) -> Tensor:
        """bool, true unless nothing is kept."""
        return torch.full(self.shape, probability > 0.0, device=self.device)


def still_value(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a random operator of ATen gives of constants; None for an operator that is not known."""
    return keyed_value(func, args, kwargs, Still(*shape_of_draw(func, args, kwargs)), lambda made: made)


@dataclass(slots=True)
class DrawLedger:
    """Keys of the draws of each microbatch's forward."""

    coarsest: float = 0.0
    """Largest distance from 1 to the next number of a dtype that an operator has returned."""
    repeated: set[str] = field(default_factory=set[str])
    """Keys that two draws of one forward have had: both would have drawn the same."""
    _seen: set[tuple[str, int, tuple[int, ...]]] = field(default_factory=set[tuple[str, int, tuple[int, ...]]])

    def note(self, key: str, context: StepContext) -> None:
        """Note a draw; one of a forward that a backward runs again has been noted before."""
        is_again = torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        state = context.current
        if state is None or is_again:
            return
        entry = (key, state.step, tuple(state.sample_ids.tolist()))
        if entry in self._seen:
            self.repeated.add(key)
        self._seen.add(entry)


class AmongRanksError(Exception):
    """A model or a loss of the user's talks to other ranks by itself."""


class _Constants(TorchDispatchMode):
    """Gives constants to every random operator that nobody keys.

    `alone`: no other rank takes part.  `look` is called before every operator.
    """

    supports_higher_order_operators = True

    def __init__(self, ledger: DrawLedger, *, alone: bool, look: Callable[[], None]) -> None:
        super().__init__()
        self._ledger, self._alone, self._look = ledger, alone, look

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled blocks run compiled; they draw nothing."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        self._look()
        if self._alone and "c10d" in func.namespace:
            raise AmongRanksError("the model or its loss calls collectives by itself")
        value = still_value(func, args, keywords) if is_draw(func, args, keywords) else None
        result = func(*args, **keywords) if value is None else value
        if self._alone and isinstance(result, Tensor) and result.is_floating_point():
            self._ledger.coarsest = max(self._ledger.coarsest, torch.finfo(result.dtype).eps)
        return result


@contextmanager
def quiet(
    modules: Sequence[nn.Module] = (), context: StepContext | None = None, look: Callable[[], None] = lambda: None
) -> Generator[DrawLedger]:
    """Take out what is drawn within.

    Args:
        modules: whose own `nn.Dropout` modules let everything pass.
        context: of a parallel model, whose keyed draws are left out and noted; None: a model on one process.
        look: called before every operator; what it raises ends the forward or the backward.

    Raises:
        AmongRanksError: from a forward or a loss on one process that calls a collective.
    """
    ledger = DrawLedger()
    dropping = [inner for module in modules for inner in module.modules() if isinstance(inner, _DROPOUTS)]
    modes = [(inner, inner.training) for inner in dropping]
    with ExitStack() as stack:
        if context is not None:
            context.ledger = ledger
            stack.callback(setattr, context, "ledger", None)
        for inner, _ in modes if context is None else ():
            inner.training = False
        stack.enter_context(cast(Any, _Constants(ledger, alone=context is None, look=look)))
        try:
            yield ledger
        finally:
            for inner, training in modes:
                inner.training = training
