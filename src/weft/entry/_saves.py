"""What a session's `save` writes of a model in training, and its `load` takes back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast, final

import torch

from weft.checkpoint import Checkpointer, Json, StoredCheckpoint
from weft.comm import Mesh
from weft.document import JsonObject
from weft.engine import TrainingState
from weft.entry._agreement import check_same_facts, gather_texts
from weft.entry._attached import Attached
from weft.entry._user_optimizer import UserOptimizer, settings_of
from weft.errors import CheckpointError
from weft.parallel import Piece

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
        """Save model, optimizer, what is attached and the `place` in the data.

        Raises:
            RecipeError: what is attached, or the optimizer's settings, differ between ranks.
            CheckpointError: it cannot be written.
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
        return self._checkpointer.save(steps, [*self._training.pieces(), *own], state)

    def _gather(self, text: str) -> list[str]:
        world = self._mesh["world"]
        return [text] if world.group is None else gather_texts(text, self._mesh.device, world.group)

    def read(self, which: Path | Literal["latest"]) -> dict[str, Json]:
        """Take a save's model, states and attached objects over, and return the rest of it.

        Raises:
            RecipeError: ranks named other saves.
            CheckpointError: there is none, it is damaged, or it is another model's.
        """
        check_same_facts({"the save that is loaded": str(which)}, self._mesh.device, self._mesh["world"].group)
        attached = list(self._attached.pieces_to_fill())

        def held(stored: StoredCheckpoint) -> list[Piece]:
            self._kept.expect(stored)
            return [*self._training.pieces(), *self._kept.own_pieces(counts=False), *attached]

        try:
            state = self._checkpointer.load(which, held, check=self._check)
            self._kept.take(state)
        finally:
            self._kept.forget()
        self._training.restored(state)
        self._attached.load(state)
        return state

    def _check(self, state: JsonObject, step: int) -> None:
        """Refuse what `write` cannot have written after `step` steps."""
        if "steps" not in state.values:
            raise CheckpointError(f"{state.path} was not saved by a session. Load it with the recipe that trained it.")
        state.count("steps", least=step, most=step)
        state.count("in_pass")
        if "passes" in state.values:
            state.count("passes")
        self._attached.check(state)
        if "last_batch" in state.values:
            state.text("last_batch", r"[0-9a-f]{0,16}", "a digest")
        self._kept.check(state)
        self._training.check_state(state)
