"""What a session's `save` writes of a model in training, and its `load` takes back."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast, final

import torch

from weft.api.ranks.agreement import check_same_facts, gather_texts
from weft.api.saving.attached import Attached
from weft.api.saving.optimizer import UserOptimizer, settings_of
from weft.comm.mesh import Mesh
from weft.config.document import Json, JsonObject
from weft.errors import CheckpointError
from weft.run.checkpoint import Checkpointer, StoredCheckpoint
from weft.run.engine import TrainingState
from weft.techniques.core import Piece

logger = logging.getLogger(__name__)


@final
class Saves:
    """The saves of one model.  Every method is called on every rank."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        training: TrainingState,
        optimizer: UserOptimizer,
        attached: Attached,
        mesh: Mesh,
    ) -> None:
        self._checkpointer = checkpointer
        self.peers = checkpointer.peers
        self._training = training
        self._kept = optimizer.kept
        self._attached = attached
        self._mesh = mesh
        self._to_fill: list[Piece] = []
        """Tensors of what is attached, while a load is under way."""

    def warn_of_earlier(self, steps: int) -> None:
        """Say after the first step that a save will be refused, where the folder is an earlier run's."""
        if steps == 1 and self.peers.rank == 0 and (earlier := self._checkpointer.earlier()) is not None:
            logger.warning(
                "%s holds saves of an earlier run (the newest: %s), and this session began anew: state.save() will be"
                " refused. Call state.load() before the first step to go on with it, or give weft.session another"
                " folder.",
                earlier.parent,
                earlier.name,
            )

    def write(self, steps: int, place: Mapping[str, Json], optimizer: torch.optim.Optimizer) -> Path:
        """Save what `written` returns.  Raises what it does, and `CheckpointError` where it cannot be written."""
        state, pieces = self.written(steps, place, optimizer)
        return self._checkpointer.save(steps, pieces, state)

    def written(
        self, steps: int, place: Mapping[str, Json], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Json], list[Piece]]:
        """Return model, optimizer, what is attached and the `place` in the data: what is no tensor, and what is.

        Raises:
            RecipeError: what is attached, or the optimizer's settings, differ between ranks.
            CheckpointError: something has no form in a checkpoint.
        """
        world = self._mesh["world"]
        facts = settings_of(optimizer) | self._kept.facts() | self._attached.facts()
        check_same_facts(facts, self._mesh.device, world.group)
        state: dict[str, Json] = {
            "steps": steps,
            **place,
            **self._kept.state(
                lambda text: gather_texts(text, self._mesh.device, world.group) if world.group else [text]
            ),
            **self._training.state(),
            "attached": cast(Json, self._attached.states()[0]),
        }
        counts = world.index == 0
        own = [*self._kept.own_pieces(counts=counts), *self._attached.pieces(counts=counts)]
        return state, [*self._training.pieces(), *own]

    def read(self, which: Path | Literal["latest"]) -> dict[str, Json]:
        """Take a save's model, states and attached objects over, and return the rest of it.

        Raises:
            RecipeError: ranks named other saves.
            CheckpointError: there is none, it is damaged, or it is another model's.
        """
        check_same_facts({"the save that is loaded": str(which)}, self._mesh.device, self._mesh["world"].group)
        with self.loading():
            state = self._checkpointer.load(which, self.to_fill, check=self._check)
            self.take(state)
        return state

    @contextmanager
    def loading(self) -> Generator[None]:
        """What is loaded goes to the optimizer within."""
        self._to_fill = list(self._attached.pieces_to_fill())
        try:
            yield
        finally:
            self._kept.forget()
            self._to_fill = []

    def to_fill(self, stored: StoredCheckpoint) -> list[Piece]:
        """Return all that is to be filled from a checkpoint, once it was checked."""
        self._kept.expect(stored)
        return [*self._training.pieces(), *self._kept.own_pieces(counts=False), *self._to_fill]

    def take(self, state: Mapping[str, Json]) -> None:
        """Go on with what was filled, and what is no tensor.  Call on every rank."""
        self._kept.take(state)
        self._training.restored(state)
        self._attached.load(state)

    def _check(self, state: JsonObject, step: int) -> None:
        """Refuse what `write` cannot have written after `step` steps."""
        if "models" in state.values:
            raise CheckpointError(
                f"{state.path} was written by session.save(), and holds all of a loop. Load it by session.load(folder)."
            )
        if "steps" not in state.values:
            raise CheckpointError(f"{state.path} was not saved by a session. Load it with the recipe that trained it.")
        state.count("steps", least=step, most=step)
        self.check(state)

    def check(self, state: JsonObject) -> None:
        """Refuse what `written` cannot have returned."""
        for name in ("steps", "in_pass", "passes"):
            if name in state.values:
                state.count(name)
        self._attached.check(state)
        if "last_batch" in state.values:
            state.text("last_batch", r"[0-9a-f]{0,16}", "a digest")
        self._kept.check(state)
        self._training.check_state(state)
