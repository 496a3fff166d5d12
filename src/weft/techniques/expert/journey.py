"""What is on its way between tokens and experts: begun and ended, forward and backward.

What is computed between `leave` and `arrive` hides the way: forward by the order of the calls, backward because
autograd runs nodes in the opposite order.  Call on every rank of the group in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import Tensor

from weft.model.derivatives import once


class Compute(Protocol):
    """This rank's experts."""

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return what they make of rows (n, features) sorted by expert, `counts` (own experts,) for each."""
        ...


class Dispatcher(Protocol):
    """How tokens meet experts that other ranks have."""

    def mix(
        self,
        tokens: Tensor,
        chosen: Tensor,
        weights: Tensor,
        compute: Compute,
        meanwhile: Callable[[], Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """Return of each token, (n, features), the sum of what the experts `chosen`, (n, top_k), make of it, times
        `weights`, (n, top_k); and what `meanwhile` returns, which is computed on the way.

        Call on every rank of the group in the same order, also on one without a token; its backward calls all of them
        again.
        """
        ...


class Journey(ABC):
    """One way: `is_outward` to the experts, else back.  Gradients take it in the other direction."""

    def __init__(self, *, is_outward: bool) -> None:
        self.is_outward = is_outward
        self._wait: Callable[[], Tensor] | None = None

    @abstractmethod
    def start(self, leaving: Tensor, *, is_outward: bool) -> tuple[Tensor, Callable[[], Tensor]]:
        """Start to send; return what will hold what comes, and what waits for it and returns it."""
        ...

    @abstractmethod
    def sort(self, arrived: Tensor) -> Tensor:
        """Return what has come to experts in the order in which they compute."""
        ...

    @abstractmethod
    def unsort(self, rows: Tensor) -> Tensor:
        """The inverse of `sort`."""
        ...

    @final
    def begin(self, leaving: Tensor, *, is_outward: bool) -> Tensor:
        """Start to send; return what will hold what comes, which `end` returns."""
        assert self._wait is None, "an exchange was begun before the last one had ended"
        arriving, self._wait = self.start(leaving, is_outward=is_outward)
        return arriving

    @final
    def end(self) -> Tensor:
        """Wait for what comes, and return it."""
        assert self._wait is not None, "an exchange was ended that had not begun"
        wait, self._wait = self._wait, None
        return wait()


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        leaving = rows if journey.is_outward else journey.unsort(rows)
        return journey.begin(leaving, is_outward=journey.is_outward)

    @staticmethod
    @once("what ranks send to one another's experts", "Use plan.mesh.expert = 1.")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        journey: Journey = ctx.journey
        said = journey.end()
        return said if journey.is_outward else journey.sort(said), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.end()
        arrived = journey.sort(arriving) if journey.is_outward else arriving
        return torch.ops.aten._unsafe_view(arrived, arrived.shape)  # autograd must see another tensor than it gave

    @staticmethod
    @once("what ranks send to one another's experts", "Use plan.mesh.expert = 1.")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        journey: Journey = ctx.journey
        leaving = journey.unsort(grads[0]) if journey.is_outward else grads[0]
        journey.begin(leaving, is_outward=not journey.is_outward)
        # What is under way has another shape than what autograd asks for: the other node takes it from the journey.
        return grads[0].new_zeros(()).expand_as(leaving), None


def leave(rows: Tensor, journey: Journey) -> Tensor:
    """Send rows, (rows, features), on their journey; return what `arrive` takes, and nothing else may read."""
    return _Leave.apply(rows, journey)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


def arrive(arriving: Tensor, journey: Journey) -> Tensor:
    """Return what came: outward as experts compute on it, back as it had left."""
    return _Arrive.apply(arriving, journey)  # pyright: ignore[reportReturnType, reportUnknownMemberType]
