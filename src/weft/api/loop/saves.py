"""Saves of a loop that keeps its own steps: all models, optimizers and states in one save, for `session.save` and
`session.load`."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import torch
from torch import nn

from weft.api.batches.generators import process_states, take_process_states
from weft.api.batches.sharded_loader import LoopLoader
from weft.api.loop.open_step import OpenModel
from weft.api.loop.shared_optimizer import SharedOptimizer
from weft.api.ranks.agreement import check_same_facts
from weft.api.saving.saves import PlainSaves, Saves
from weft.api.saving.stateful import EXTRA, SCHEDULERS, StatefulObjects
from weft.comm.mesh import Mesh
from weft.config.document import Json, JsonObject
from weft.errors import CheckpointError
from weft.run.checkpoint import Checkpointer, Peers, StoredCheckpoint
from weft.run.data.preparation import path_of
from weft.techniques.core import CheckpointShard

logger = logging.getLogger(__name__)

_BESIDE = re.compile(r"(model-\d+|extra|schedulers)/", re.ASCII)
"""Beginning of the names of all tensors but those of the first model."""


@dataclass(slots=True)
class LoopObjects:
    """The objects that `session.prepare` was given without a loss, each in its order."""

    models: list[nn.Module] = field(default_factory=list[nn.Module])
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list[torch.optim.Optimizer])
    schedulers: list[Any] = field(default_factory=list[Any])
    loaders: list[LoopLoader] = field(default_factory=list[LoopLoader])
    shared: list[SharedOptimizer] = field(default_factory=list[SharedOptimizer])
    begun: list[tuple[nn.Module, OpenModel]] = field(default_factory=list[tuple[nn.Module, OpenModel]])

    def state_of(self, model: nn.Module) -> OpenModel | None:
        """The model under its plan; None: it has not been called yet, or has no optimizer."""
        return next((state for begun, state in self.begun if begun is model), None)

    def optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimizers that hold parameters of the model."""
        own = {id(parameter) for parameter in model.parameters()}
        return [
            optimizer
            for optimizer in self.optimizers
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
        ]

    def drop(self, thing: Any) -> None:
        """Forget a thing."""
        self.begun[:] = [begun for begun in self.begun if begun[0] is not thing]
        for kind in (self.models, self.optimizers, self.schedulers, self.loaders):
            cast(list[Any], kind)[:] = [item for item in kind if item is not thing]


class _PendingLoad(NamedTuple):
    """A model that was loaded before its first forward, when its plan is chosen and its optimizer's states are cut."""

    stored: StoredCheckpoint
    versions: dict[str, tuple[int, int]]
    """Versions of the model's weights as they were loaded."""


@final
class LoopSaves:
    """Saves and loads all of a loop.  Every method is called on every rank."""

    def __init__(self, things: LoopObjects, device: torch.device, mesh: Callable[[], Mesh]) -> None:
        """`mesh` is any that has all ranks."""
        self._things, self._device, self._mesh = things, device, mesh
        self._waiting: dict[int, _PendingLoad] = {}

    # ── saving ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None) -> Path:
        """See `Session.save`."""
        started, things = time.monotonic(), self._things
        path, beside = path_of("session.save(folder)", folder, CheckpointError), self._beside(extra)
        for model in things.models:
            if id(model) in self._waiting:
                raise CheckpointError(
                    f"the {type(model).__name__} was loaded and not called since, so that its optimizer's states are"
                    f" still in {self._waiting[id(model)].stored.folder}. Save after a step, or copy that folder."
                )
        for shared in things.shared:
            shared.give_settings()
        world = self._mesh()["world"]
        loaders = [loader.state_dict() for loader in things.loaders]
        places = {
            f"data: the place of loader {number}": f"batch {loader['batches']} of pass {loader['passes']}"
            for number, loader in enumerate(loaders, 1)
        }
        forms = {item.member: cast(Json, item.written()) for item in beside}
        facts = {"the folder of session.save()": str(path), **places}
        for item in beside:
            facts |= item.facts()
        check_same_facts(facts, self._device, world.group)
        states = list[Json]()
        shards = [shard for item in beside for shard in item.checkpoint_shards(counts=world.index == 0)]
        for number, model in enumerate(things.models, 1):
            state, own = self._part(model).written()
            states.append({"class": type(model).__name__, **state})
            shards += [replace(shard, name=_prefix(number) + shard.name) for shard in own]
        whole: dict[str, Json] = {
            "models": states,
            "loaders": cast(Json, loaders),
            **forms,
            "generators": cast(Json, process_states(self._device)),
        }
        steps = max((begun.steps for _, begun in things.begun), default=0)
        saved = Checkpointer(path, Peers.of_group(world), keep=1, owned=None).save(steps, shards, whole)
        for _, begun in things.begun:
            begun.note_save(saved, time.monotonic() - started)
        return path

    def _beside(self, extra: Mapping[str, Any] | None) -> list[StatefulObjects]:
        """Return the objects that are neither model nor optimizer, for one save or load."""
        schedulers = {str(number): scheduler for number, scheduler in enumerate(self._things.schedulers, 1)}
        saved = (*self._things.models, *self._things.optimizers)
        return [StatefulObjects(SCHEDULERS, schedulers), StatefulObjects(EXTRA, extra, saved)]

    def _part(self, model: nn.Module) -> OpenModel | PlainSaves:
        begun = self._things.state_of(model)
        if begun is not None:
            return begun
        owners = self._things.optimizers_of(model)
        return PlainSaves(model, owners[0] if owners else None, self._mesh()["world"], self._device)

    # ── loading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, folder: str | Path, extra: Mapping[str, Any] | None) -> int:
        """See `Session.load`."""
        path, beside = path_of("session.load(folder)", folder, CheckpointError), self._beside(extra)
        world, things = self._mesh()["world"], self._things
        check_same_facts({"the folder of session.load()": str(path)}, self._device, world.group)
        for _, state in things.begun:
            state.leave_step("session.load()")
        parts = [self._part(model) for model in things.models]
        with _loading(parts) as fillers:
            files = Checkpointer(path, Peers.of_group(world))
            stored = files.open(path, lambda state, _: self._check(state, fillers, beside))
            models = cast(list[dict[str, Json]], stored.manifest.state["models"])
            cut = [_part_of(stored, number, models[number - 1]) for number in range(1, len(parts) + 1)]
            files.fill(
                [
                    *(_wanted(one, filler) for one, filler in zip(cut, fillers, strict=True)),
                    (_beside_in(stored), [shard for item in beside for shard in item.to_fill(stored)]),
                ]
            )
            for one, filler in zip(cut, fillers, strict=True):
                filler.take(one.manifest.state)
        for model, part, one in zip(things.models, parts, cut, strict=True):
            if isinstance(part, OpenModel):
                part.loaded(one.manifest.state)
            elif part.has_optimizer:
                self._waiting[id(model)] = _PendingLoad(one, _versions(model))
        self._go_on(stored, beside)
        return max((cast(int, model["steps"]) for model in models), default=0)

    def _check(
        self, state: JsonObject, fillers: Sequence[Saves | PlainSaves], beside: Sequence[StatefulObjects]
    ) -> None:
        """Refuse what `save` has not written, or not of such a loop."""
        if "models" not in state.values:
            raise CheckpointError(
                f"{state.path} was not written by session.save(). Load it by what has written it: state.load(path), or"
                " `weft train --resume`."
            )
        models = list(state.objects("models"))
        if len(models) < len(fillers) or len(state.items("loaders")) < len(self._things.loaders):
            raise CheckpointError(
                f"{state.path} has {len(models)} models and {len(state.items('loaders'))} loaders, and session.prepare"
                f" was given {len(fillers)} and {len(self._things.loaders)}. Prepare what was saved, in the same order."
            )
        for one, filler in zip(models, fillers, strict=False):
            one.count("steps")
            filler.check(one)
        for item in beside:
            item.check(state)
        state.object("generators")

    def _go_on(self, stored: StoredCheckpoint, beside: Sequence[StatefulObjects]) -> None:
        state, things = cast(dict[str, Any], stored.manifest.state), self._things
        for shared in things.shared:
            shared.take_settings()
        for item in beside:
            item.take(state)
        for loader, place in zip(things.loaders, state["loaders"], strict=False):
            loader.resume(place)
        take_process_states(self._device, state["generators"])
        left = {
            "models": len(state["models"]) - len(things.models),
            "loaders": len(state["loaders"]) - len(things.loaders),
            "schedulers": len(state["schedulers"]) - len(things.schedulers),
        }
        more = [f"{number} more {name}" for name, number in left.items() if number]
        if more and self._mesh()["world"].index == 0:
            logger.warning("%s holds %s than session.prepare was given: not loaded.", stored.folder, " and ".join(more))

    @contextmanager
    def beginning(self, model: nn.Module) -> Generator[list[OpenModel]]:
        """The first forward of a model; within, its state is put into the list.  It takes up what was loaded before."""
        waiting = self._waiting.get(id(model))
        is_untouched = waiting is not None and waiting.versions == _versions(model)
        models: list[OpenModel] = []
        yield models
        if waiting is None:
            return
        stored, names = waiting.stored, waiting.stored.runs
        if not is_untouched:  # what the loop has written into the weights since goes on
            names = [name for name in names if not name.startswith(("model/", "buffer/"))]
            stored = stored.part({name: name for name in names}, stored.manifest.state)
        path = stored.folder / "manifest.json"
        with models[0].loading() as filler:
            filler.check(JsonObject(path, CheckpointError, "", dict(stored.manifest.state), "state.models."))
            shards = [shard for shard in filler.to_fill(stored) if is_untouched or not _is_weight(shard)]
            Checkpointer(stored.folder, Peers.of_group(self._mesh()["world"])).fill([(stored, shards)])
            filler.take(stored.manifest.state)
        models[0].loaded(stored.manifest.state)
        del self._waiting[id(model)]


def _prefix(number: int) -> str:
    """Return the prefix of a model's tensor names: the first model's are those of any other run's checkpoint."""
    return "" if number == 1 else f"model-{number}/"


def _part_of(stored: StoredCheckpoint, number: int, state: Mapping[str, Json]) -> StoredCheckpoint:
    prefix = _prefix(number)
    names = [name for name in stored.runs if (name.startswith(prefix) if prefix else not _BESIDE.match(name))]
    return stored.part({name: name.removeprefix(prefix) for name in names}, state)


def _wanted(stored: StoredCheckpoint, filler: Saves | PlainSaves) -> tuple[StoredCheckpoint, list[CheckpointShard]]:
    """Return the shards of a model that are filled now, and the save that is looked at for them."""
    shards = filler.to_fill(stored)
    if isinstance(filler, Saves):
        return stored, shards
    # The rest is of the model's training: it is taken up when the model is called first, or never trained on.
    wanted = {shard.name for shard in shards}
    names = [name for name in stored.runs if name in wanted or name.startswith(("model/", "buffer/"))]
    return stored.part({name: name for name in names}, stored.manifest.state), shards


def _beside_in(stored: StoredCheckpoint) -> StoredCheckpoint:
    names = [name for name in stored.runs if name.startswith(("extra/", "schedulers/"))]
    return stored.part({name: name for name in names}, {})


def _is_weight(shard: CheckpointShard) -> bool:
    return shard.name.startswith(("model/", "buffer/"))


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return marks that differ once a weight was written to."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (value.data_ptr(), value._version) for name, value in tensors.items()}  # pyright: ignore[reportPrivateUsage]


@contextmanager
def _loading(parts: Sequence[OpenModel | PlainSaves]) -> Generator[list[Saves | PlainSaves]]:
    """All parts, each ready to be filled.  No ExitStack: an error that passes one stays alive."""
    if not parts:
        yield []
        return
    with parts[0].loading() as one, _loading(parts[1:]) as others:
        yield [one, *others]
