"""Save and load one model: one in training, and one that is plain still."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self, cast, final

import torch
from torch import Tensor, nn

from weft.api.ranks.agreement import check_same_facts, gather_texts
from weft.api.saving.optimizer import UserOptimizer, settings_of
from weft.api.saving.optimizer_states import RankStates
from weft.api.saving.stateful import StatefulObjects
from weft.comm.mesh import GroupView, Mesh
from weft.config.document import Json, JsonObject
from weft.errors import CheckpointError
from weft.run.checkpoint import Checkpointer, StoredCheckpoint
from weft.run.checkpoint.tiers import TieredCheckpointer
from weft.run.engine import TrainingState
from weft.techniques.core import CheckpointShard, NestedSplit

logger = logging.getLogger(__name__)


@final
class Saves:
    """The saves of one model.  Every method is called on every rank."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        training: TrainingState,
        optimizer: UserOptimizer,
        attached: StatefulObjects,
        mesh: Mesh,
        tiers: TieredCheckpointer | None = None,
    ) -> None:
        """`tiers` takes snapshots into memory beside the saves; None: there are none."""
        self._checkpointer, self._tiers = checkpointer, tiers
        self._snapshot_at = time.perf_counter()
        self._snapshot_step = 0
        self.peers = checkpointer.peers
        self._training = training
        self._kept = optimizer.kept
        self._attached = attached
        self._mesh = mesh

    def warn_of_earlier(self, steps: int) -> None:
        """Warn after the first step that a save will be refused, where the folder is an earlier run's."""
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
        state, shards = self.written(steps, place, optimizer)
        return self._checkpointer.save(steps, shards, state)

    def written(
        self, steps: int, place: Mapping[str, Json], optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Json], list[CheckpointShard]]:
        """Return model, optimizer, what is attached and the `place` in the data: what is no tensor, and what is.

        Raises:
            RecipeError: what is attached, or the optimizer's settings, differ between ranks.
            CheckpointError: something has no form in a checkpoint.
        """
        world, attached = self._mesh["world"], self._attached.written()
        facts = settings_of(optimizer) | self._kept.facts() | self._attached.facts()
        # Compared before anything is written: of ranks that differ no save would be right for all.
        check_same_facts(facts, self._mesh.device, world.group)
        state: dict[str, Json] = {
            "steps": steps,
            **place,
            **self._kept.state(
                lambda text: gather_texts(text, self._mesh.device, world.group) if world.group else [text]
            ),
            **self._training.state(),
            "attached": cast(Json, attached),
        }
        counts = world.index == 0
        # Tensors that every rank has alike are written by rank 0.
        own = [*self._kept.own_shards(counts=counts), *self._attached.checkpoint_shards(counts=counts)]
        return state, [*self._training.checkpoint_shards(), *own]

    def begin_snapshots(self, steps: int) -> None:
        """Take snapshots into memory from now on, after `steps` finished steps."""
        if self._tiers is not None:
            self._tiers.begin(steps)
            self._snapshot_at, self._snapshot_step = time.perf_counter(), steps

    def snapshot(
        self, steps: int, place: Callable[[], Mapping[str, Json]], optimizer: torch.optim.Optimizer, *, at_once: bool
    ) -> None:
        """Take one where one is due, or `at_once`.  It costs no more than what a failure would: see `tiers`."""
        tiers = self._tiers
        if tiers is None or not tiers.next_snapshot or (steps < tiers.next_snapshot and not at_once):
            return
        seconds = (time.perf_counter() - self._snapshot_at) / max(steps - self._snapshot_step, 1)
        state, shards = self.written(steps, place(), optimizer)
        tiers.snapshot(steps, shards, state, seconds)
        self._snapshot_at, self._snapshot_step = time.perf_counter(), steps

    def read(self, which: Path | Literal["latest"]) -> dict[str, Json]:
        """Take a save's model, states and attached objects over, and return the rest of it.

        Raises:
            RecipeError: ranks named other saves.
            CheckpointError: there is none, it is damaged, or it is another model's.
        """
        check_same_facts({"the save that is loaded": str(which)}, self._mesh.device, self._mesh["world"].group)
        with self.loading():
            state = (self._tiers or self._checkpointer).load(which, self.to_fill, check=self._check)
            self.take(state)
        return state

    @contextmanager
    def loading(self) -> Generator[None]:
        """What is loaded goes to the optimizer within."""
        try:
            yield
        finally:
            self._kept.forget()

    def to_fill(self, stored: StoredCheckpoint) -> list[CheckpointShard]:
        """Return all that is to be filled from a checkpoint, once it was checked."""
        self._kept.expect(stored)
        return [
            *self._training.checkpoint_shards(),
            *self._kept.own_shards(counts=False),
            *self._attached.to_fill(stored),
        ]

    def take(self, state: Mapping[str, Json]) -> None:
        """Go on with what was filled, and what is no tensor.  Call on every rank."""
        self._kept.take(state)
        self._training.restored(state)
        self._attached.take(state)

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
        for name in ("steps", "in_pass", "passes", "unfinished_epoch"):
            if name in state.values:
                state.count(name)
        self._attached.check(state)
        if "last_batch" in state.values:
            state.text("last_batch", r"[0-9a-f]{0,16}", "a digest")
        self._kept.check(state)
        self._training.check_state(state)


@final
class PlainSaves:
    """A model that has not been called yet, or has no optimizer: every rank has it whole, and its optimizer's settings.

    The save has the form of one that a plan was laid over, so that either is loaded into the other.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: GroupView, device: torch.device
    ) -> None:
        self._model, self._world, self._device = model, world, device
        self._kept = None if optimizer is None else RankStates(optimizer, [])
        self._rooms: list[tuple[Tensor, Tensor]] = []
        """Tensors without flat storage, and what a load fills in their place."""

    @property
    def has_optimizer(self) -> bool:
        """Whether it will train."""
        return self._kept is not None

    def written(self) -> tuple[dict[str, Json], list[CheckpointShard]]:
        """Return what is no tensor, and what is.

        Raises:
            CheckpointError: a setting of the optimizer has no form in a checkpoint.
        """
        counts = self._world.index == 0
        state: dict[str, Json] = {"steps": 0, "attached": {}, "loss_scale": None}
        shards = self._shards(counts=counts)
        if self._kept is not None:
            state |= self._kept.state(self._gathered)
            shards += self._kept.own_shards(counts=counts)
        return state, shards

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

    def to_fill(self, stored: StoredCheckpoint) -> list[CheckpointShard]:
        """Return the weights, and what the optimizer's settings hold of tensors."""
        shards = self._shards(counts=False)
        if self._kept is not None:
            self._kept.expect(stored)
            shards += self._kept.own_shards(counts=False)
        return shards

    @torch.no_grad()
    def take(self, state: Mapping[str, Json]) -> None:
        """Go on with what was filled."""
        for tensor, room in self._rooms:
            tensor.copy_(room.view(tensor.shape))
        if self._kept is not None:
            self._kept.take(state)

    def _shards(self, *, counts: bool) -> list[CheckpointShard]:
        saved = set(self._model.state_dict(keep_vars=True))
        buffers = [(name, buffer) for name, buffer in self._model.named_buffers() if name in saved]
        return [
            *(
                self._shard(f"model/{name}", parameter, counts=counts)
                for name, parameter in self._model.named_parameters()
            ),
            *(self._shard(f"buffer/{name}", buffer, counts=counts) for name, buffer in buffers),
        ]

    def _shard(self, name: str, tensor: Tensor, *, counts: bool) -> CheckpointShard:
        tensor = tensor.detach()
        if tensor.is_complex():  # stored as real and imaginary parts
            tensor = torch.view_as_real(tensor)
        flat = tensor.contiguous().view(-1)
        if not tensor.is_contiguous():
            self._rooms.append((tensor, flat))
        return CheckpointShard(name=name, shape=tensor.shape, tensor=flat, split=NestedSplit(), start=0, counts=counts)

    def _gathered(self, text: str) -> list[str]:
        return [text] if self._world.group is None else gather_texts(text, self._device, self._world.group)
