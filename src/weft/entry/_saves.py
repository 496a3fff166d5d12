"""What a session's `save` writes of a model in training, and its `load` takes back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast, final

import torch

from weft.checkpoint import Checkpointer, Json
from weft.comm import Mesh
from weft.document import JsonObject
from weft.engine import TrainingState
from weft.entry._agreement import check_same_facts
from weft.entry._attached import Attached
from weft.entry._user_optimizer import UserOptimizer, settings_of
from weft.errors import CheckpointError


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
        self._training = training
        self._optimizer = optimizer
        self._attached = attached
        self._mesh = mesh

    def write(self, steps: int, place: Mapping[str, Json], optimizer: torch.optim.Optimizer) -> Path:
        """Save model, optimizer, what is attached and the `place` in the data.

        Raises:
            RecipeError: what is attached, or the optimizer's settings, differ between ranks.
            CheckpointError: it cannot be written.
        """
        facts = settings_of(optimizer) | self._attached.facts()
        check_same_facts(facts, self._mesh.device, self._mesh["world"].group)
        state: dict[str, Json] = {
            "steps": steps,
            **place,
            "optimizer": cast(Json, self._optimizer.settings()),
            **self._training.state(),
            "attached": cast(Json, self._attached.states()[0]),
        }
        self._optimizer.create_states()
        held = [*self._training.pieces(), *self._attached.pieces(counts=self._mesh["world"].index == 0)]
        return self._checkpointer.save(steps, held, state)

    def read(self, which: Path | Literal["latest"]) -> dict[str, Json]:
        """Take a save's model, states and attached objects over, and return the rest of it.

        Raises:
            RecipeError: ranks named other saves.
            CheckpointError: there is none, it is damaged, or it is another model's.
        """
        check_same_facts({"the save that is loaded": str(which)}, self._mesh.device, self._mesh["world"].group)
        self._optimizer.create_states()
        held = [*self._training.pieces(), *self._attached.pieces_to_fill()]
        state = self._checkpointer.load(which, held, check=self._check)
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
        self._optimizer.check_settings(state)
        self._training.check_state(state)
