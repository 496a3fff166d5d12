"""Local SGD and DiLoCo: replicas step by themselves, and average what they learnt at the end of each round.

Source: Stich, "Local SGD converges fast and communicates little" (ICLR 2019, algorithm 1); Douillard et al., "DiLoCo:
distributed low-communication training of language models" (arXiv 2311.08105, algorithm 1), whose outer optimizer is
SGD with Nesterov momentum as `torch.optim.SGD` has it.  With anchor θ, the weights at the start of a round of H inner
steps, and θᵣ, what replica r made of them:

    Δ = Σᵣ wᵣ·(θ − θᵣ)        wᵣ: share of the tokens (or samples) of the round that replica r counted
    v ← μ·v + Δ
    θ ← θ − λ·(Δ + μ·v)       and every replica goes on from θ

λ = 1, μ = 0 is local SGD: θ becomes the average of the replicas.  The papers weight all replicas alike; equal shares
make that of it.  With unequal ones, H = 1, plain SGD, λ = 1 and μ = 0, the weights by counts give exactly the step of
ordinary data parallelism.

The sum is made in the storage of the masters, so that a round's end needs no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, final

import torch
from torch import Tensor

from weft.comm.mesh import GroupView, Mesh
from weft.comm.reduce import Wait, nothing_to_wait_for, start_all_reduce
from weft.config.document import Json, JsonObject
from weft.formatting import format_bytes
from weft.techniques.core import CheckpointShard, Shard, checkpoint_shards_of, exchange_masters, resident_groups
from weft.techniques.local_steps.contract import LocalSteps
from weft.techniques.local_steps.settings import LocalStepsSettings
from weft.techniques.runtime import Build, TechniqueRuntime


@final
class LocalRounds(TechniqueRuntime):
    """Anchor, outer momentum, and the sums at the end of each round.  Create and call it on every rank alike.

    `last_step` is the number of the training's steps: its last round ends there, however short it is.  None: whoever
    owns the loop says by `finish` when no more steps come.
    """

    changes_masters: ClassVar[bool] = True
    span: ClassVar[str] = "average_replicas"
    saved_as: ClassVar[str] = LocalSteps.saved_as

    def __init__(self, mesh: Mesh, settings: LocalStepsSettings, *, last_step: int | None) -> None:
        self._shards: tuple[Shard, ...] = ()
        self._anchors: list[Tensor] = []
        self._velocities: list[Tensor] = []
        self._replicas: GroupView = mesh["replicate"]
        self._settings = settings
        self._learning_rate = settings.outer_learning_rate
        self._momentum = settings.outer_momentum
        self._last_step = last_step
        self._counts = [0.0] * self._replicas.size

    def gradient_mesh(self, mesh: Mesh) -> Mesh:
        """Return the mesh inside of a replica: gradients are not summed over replicas."""
        return mesh.within_replica()

    def attach_shards(self, shards: Sequence[Shard]) -> None:
        """Begin the first round.  `shards` are those of stores that sum gradients inside a replica only, so that the
        ranks of `mesh["replicate"]` hold the same runs of the same parameters."""
        self._shards = tuple(shards)
        self._anchors = [shard.master.detach().clone() for shard in self._shards]
        self._velocities = [torch.zeros_like(anchor) for anchor in self._anchors] if self._momentum else []

    @property
    def is_open(self) -> bool:
        """Whether some step of this round has been applied, so that replicas differ."""
        return any(self._counts)

    def end_step(self, step: int, counts: Sequence[float] | None) -> bool:
        """Note a step, and end the round with its last one.  Return whether the masters have changed thereby.

        Args:
            step: number of the step, from 0.  Rounds end where `step + 1` is a multiple of their length, whatever was
                skipped, so that a resumed run has the same rounds.
            counts: what each replica counted in the step; None when the step was skipped.
        """
        if counts is not None:
            self._counts = [total + count for total, count in zip(self._counts, counts, strict=True)]
        if not self._settings.ends_round(step, self._last_step) or not self.is_open:
            return False
        self._average()
        return True

    def finish(self) -> bool:
        """End the round under way, however short it is.  Return whether there was one."""
        if not self.is_open:
            return False
        self._average()
        return True

    @torch.no_grad()
    def _average(self) -> None:
        # A replica that has counted more labels weighs more; the module's docstring says when that is exact.
        weight = self._counts[self._replicas.index] / sum(self._counts)
        for here in resident_groups(self._shards, states=False):
            waits: list[Wait] = []
            for index in here:
                master = self._shards[index].master  # (size,)
                # The difference takes the master's place: a round needs no memory beside the anchors.
                torch.sub(self._anchors[index], master, out=master)
                master.mul_(weight)
                empty = not master.numel()  # a parameter with fewer rows than ranks, in all replicas alike
                waits.append(nothing_to_wait_for if empty else start_all_reduce(master, self._replicas))
            # All reductions of a resident group are under way before the first is waited for.
            for index, wait in zip(here, waits, strict=True):
                wait()
                self._step_outer(index, self._shards[index].master)
        self._counts = [0.0] * self._replicas.size

    def _step_outer(self, index: int, difference: Tensor) -> None:
        """Move an anchor by the replicas' mean difference, which lies in the masters, and the masters to it."""
        anchor = self._anchors[index]
        if self._velocities:
            # Nesterov momentum, the outer optimizer of DiLoCo (Douillard et al., arXiv 2311.08105, §2).
            velocity = self._velocities[index].mul_(self._momentum).add_(difference)
            difference.add_(velocity, alpha=self._momentum)
        anchor.sub_(difference, alpha=self._learning_rate)
        difference.copy_(anchor)

    @contextmanager
    def evaluated(self, gather_weights: Callable[[], None]) -> Generator[None]:
        """Let the model have the weights that replicas agreed on last, and its own, bit for bit, after it.

        `gather_weights` brings masters into the parameters.  Enter and leave on every rank.  Between rounds
        nothing happens.
        """
        if not self.is_open:
            yield
            return
        exchange_masters(self._shards, self._anchors)
        try:
            gather_weights()
            yield
        finally:
            exchange_masters(self._shards, self._anchors)
            gather_weights()

    # ── memory, checkpoints ───────────────────────────────────────────────────────────────────────────────────────────

    def state_bytes(self) -> int:
        """Return the bytes of anchors and outer momentum on this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self._anchors, *self._velocities))

    def round_bytes(self) -> int:
        """Return the bytes that this rank hands to all-reduces at the end of a round: its masters."""
        return sum(anchor.numel() * anchor.element_size() for anchor in self._anchors)

    def notes(self) -> list[str]:
        steps, size = self._settings.local_steps, self.round_bytes()
        if steps == 1:
            return []  # every step is a round, whose collectives a dry run sees
        return [
            f"replicas all-reduce {format_bytes(size)} of weights in every {steps}. step, which is not in these"
            f" numbers: {format_bytes(size / steps)} per step in the mean"
        ]

    def checkpoint_shards(self, stored_shards: list[CheckpointShard]) -> list[CheckpointShard]:
        """Return weights, outer momentum and optimizer states for saving and loading.

        What any plan can load bears the usual names: the weights that replicas agreed on last, and the optimizer
        states of the first replica.  The rest is `local/momentum/…` and, by replica, `local/<index>-of-<number>/…`: its
        optimizer states, and in the middle of a round its weights.  A replica that finds none of its own starts from
        the usual ones, so they are listed for it as well, and fill what is then filled again.
        """
        masters = [stored for stored in stored_shards if stored.name.startswith("model/")]
        optimizer = [stored for stored in stored_shards if not stored.name.startswith("model/")]
        anchors = checkpoint_shards_of("model", self._shards, self._anchors)
        saved = [self._shared(stored) for stored in anchors]
        saved += [replace(stored, counts=False) for stored in masters]
        saved += [self._shared(stored) for stored in optimizer]
        if self._velocities:
            velocities = checkpoint_shards_of("local/momentum", self._shards, self._velocities)
            saved += [self._shared(stored) for stored in velocities]
        saved += self._own(masters, counts=self.is_open)
        if self._replicas.index:
            saved += self._own(optimizer, counts=True)
        return saved

    def _shared(self, stored: CheckpointShard) -> CheckpointShard:
        """Let the first replica alone write a tensor that all of them hold."""
        return replace(stored, counts=stored.counts and self._replicas.index == 0)

    def _own(self, stored_shards: Sequence[CheckpointShard], *, counts: bool) -> Iterator[CheckpointShard]:
        prefix = f"local/{self._replicas.index}-of-{self._replicas.size}"
        for stored in stored_shards:
            yield replace(stored, name=f"{prefix}/{stored.name}", counts=stored.counts and counts)

    def state(self) -> dict[str, Json]:
        """Return what is no tensor: how much each replica has counted in the round under way."""
        return {"counts": list[Json](self._counts)}

    def check_state(self, state: JsonObject) -> None:
        """Refuse counts that are none.  Raises `CheckpointError`."""
        state.only(("counts",))
        for count in state.items("counts"):
            if type(count) not in (int, float) or not 0 <= count < 2.0**62:
                raise state.fail("counts", "a list of numbers from 0")

    def load_state(self, state: Mapping[str, Json]) -> None:
        """Take over what `state` returned, after the checkpoint shards have been filled.  Where other replicas saved
        it, or none, all start a round from the weights that were agreed on last."""
        counts = state.get("counts")
        mine = [float(count) for count in counts if isinstance(count, int | float)] if isinstance(counts, list) else []
        self._counts = mine if len(mine) == self._replicas.size else [0.0] * self._replicas.size


def create(build: Build) -> TechniqueRuntime:
    """See `weft.techniques.runtime`."""
    return LocalRounds(build.mesh, build.plan.data_parallel, last_step=build.num_steps)
