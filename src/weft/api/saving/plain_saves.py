"""The save of a model that is plain: it has not been called yet, or has no optimizer."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Self, final

import torch
from torch import Tensor, nn

from weft.api.ranks.agreement import gather_texts
from weft.api.saving.optimizer_states import KeptStates
from weft.comm.mesh import GroupView
from weft.config.document import Json, JsonObject
from weft.errors import CheckpointError
from weft.run.checkpoint import StoredCheckpoint
from weft.techniques.core import NestedSplit, Piece


@final
class PlainSaves:
    """A model that every rank has whole, with the settings of its optimizer, if it has one.

    The save has the form of one that a plan was laid over, so that either is loaded into the other.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: GroupView, device: torch.device
    ) -> None:
        self._model, self._world, self._device = model, world, device
        self._kept = None if optimizer is None else KeptStates(optimizer, [])
        self._rooms: list[tuple[Tensor, Tensor]] = []
        """Tensors without flat storage, and what a load fills in their place."""

    @property
    def has_optimizer(self) -> bool:
        """Whether it will train."""
        return self._kept is not None

    def written(self) -> tuple[dict[str, Json], list[Piece]]:
        """Return what is no tensor, and what is.

        Raises:
            CheckpointError: a setting of the optimizer has no form in a checkpoint.
        """
        counts = self._world.index == 0
        state: dict[str, Json] = {"steps": 0, "attached": {}, "loss_scale": None}
        pieces = self._pieces(counts=counts)
        if self._kept is not None:
            state |= self._kept.state(self._gathered)
            pieces += self._kept.own_pieces(counts=counts)
        return state, pieces

    @contextmanager
    def loading(self) -> Generator[Self]:
        """What is loaded goes to the optimizer within."""
        try:
            yield self
        finally:
            self._rooms.clear()
            if self._kept is not None:
                self._kept.forget()

    def check(self, state: JsonObject) -> None:
        """Refuse what belongs to no such model."""
        if self._kept is None:
            return
        if "optimizer" not in state.values:
            raise CheckpointError(
                f"{state.path} holds no optimizer for the {type(self._model).__name__}, whose own would begin anew."
                " Load before the optimizer is prepared, to take the weights alone."
            )
        self._kept.check(state)

    def to_fill(self, stored: StoredCheckpoint) -> list[Piece]:
        """Return the weights, and what the optimizer's settings hold of tensors."""
        pieces = self._pieces(counts=False)
        if self._kept is not None:
            self._kept.expect(stored)
            pieces += self._kept.own_pieces(counts=False)
        return pieces

    @torch.no_grad()
    def take(self, state: Mapping[str, Json]) -> None:
        """Go on with what was filled."""
        for tensor, room in self._rooms:
            tensor.copy_(room.view(tensor.shape))
        if self._kept is not None:
            self._kept.take(state)

    def _pieces(self, *, counts: bool) -> list[Piece]:
        saved = set(self._model.state_dict(keep_vars=True))
        buffers = [(name, each) for name, each in self._model.named_buffers() if name in saved]
        return [
            *(self._piece(f"model/{name}", each, counts=counts) for name, each in self._model.named_parameters()),
            *(self._piece(f"buffer/{name}", each, counts=counts) for name, each in buffers),
        ]

    def _piece(self, name: str, tensor: Tensor, *, counts: bool) -> Piece:
        tensor = tensor.detach()
        if tensor.is_complex():  # stored as real and imaginary parts
            tensor = torch.view_as_real(tensor)
        flat = tensor.contiguous().view(-1)
        if not tensor.is_contiguous():
            self._rooms.append((tensor, flat))
        return Piece(name=name, shape=tensor.shape, tensor=flat, split=NestedSplit(), start=0, counts=counts)

    def _gathered(self, text: str) -> list[str]:
        return [text] if self._world.group is None else gather_texts(text, self._device, self._world.group)
