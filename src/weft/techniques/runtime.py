"""What a technique does on a rank: the half of its contract that needs torch.

Where a technique's contract says that a plan `runs` it, its folder has a file `runtime.py` with a function
`create(build: Build) -> TechniqueRuntime`.  Ranks import that file by name, so they load what their plan uses and
nothing else.  `parallelize` and `weft.run.engine` call the hooks below, each for all techniques in the order of the
registry, and know no technique by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from weft.comm.mesh import Mesh
from weft.config.document import JsonObject
from weft.config.plan import Plan
from weft.model.blueprint import Blueprint
from weft.techniques.core._context import StepContext
from weft.techniques.core._part import ModelPart
from weft.techniques.core._runner import Runner
from weft.techniques.core._shard import CheckpointShard, Shard
from weft.techniques.core.precision import Dtypes
from weft.techniques.randomness._draw_trace import Draws

if TYPE_CHECKING:
    from torch.distributed.fsdp import OffloadPolicy

    from weft.techniques.compression.codecs import CodecSpec
    from weft.techniques.data.find_whole_batch import WholeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What every technique of a rank is told before there is a model; the same on all ranks but for the mesh."""

    blueprint: Blueprint
    plan: Plan
    mesh: Mesh
    dtypes: Dtypes
    context: StepContext
    draws: Draws
    """What the model and its loss draw by functions."""
    seed: int
    whole_batch: WholeBatch | None = None
    """What data ranks gather for a loss that is no sum over samples; None: it is one, or there is one data rank."""
    momentum_decay: float | None = None
    """The optimizer's, where it is an AdamW that can freeze its variance."""
    num_steps: int | None = None
    """Steps of the whole training; None where a loop of the user's own decides."""
    folder: Path | None = None
    """Where the run keeps its files; None where there is no run."""


class TechniqueRuntime:
    """One technique on one rank.  A subclass overrides the hooks that it needs; the others do nothing.

    Every hook is called on every rank alike, in the order in which they stand here.
    """

    changes_masters: ClassVar[bool] = False
    """Whether `end_step` may change masters, so that no weights may be gathered ahead of it."""
    span: ClassVar[str] = ""
    """Name by which the recorder keeps the time of `end_step`; empty: there is nothing to do at the end of a step."""
    saved_as: ClassVar[str] = ""
    """Key of `state` in a checkpoint, which is the contract's; empty: there is none."""

    # ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def gradient_mesh(self, mesh: Mesh) -> Mesh:
        """Return the mesh over whose data ranks the gradients of a step are summed."""
        return mesh

    def parts(self) -> list[ModelPart] | None:
        """Return the stages of the model that this rank holds; None: the whole model is one."""
        return None

    def split(self, part: ModelPart) -> None:
        """Split a part over ranks and say so in its layout.  It has no storage yet."""

    def tie_parts(self, parts: Sequence[ModelPart]) -> None:
        """Let parts share what belongs to several of them.  They have storage and initial weights now."""

    def wrap(self, part: ModelPart) -> None:
        """Put something around or in place of forwards of a part's modules."""

    def offload_policy(self) -> OffloadPolicy | None:
        """Return how `fully_shard` brings shards that lie with the host to the device; None: they lie on the device."""
        return None

    def on_sharded(self, part: ModelPart) -> Callable[[], None] | None:
        """ZeRO-3 has cut a part's weights over ranks; those that are drawn in shards have no storage yet.  Return what
        to call after each of them is filled."""
        return None

    def codec(self) -> CodecSpec | None:
        """Return what gradients are compressed by on their way; None: they travel as they are."""
        return None

    def attach_shards(self, shards: Sequence[Shard]) -> None:
        """Take hold of what the optimizer will update, before it is built.  Who keeps masters and states elsewhere
        becomes the shards' `keeper` here."""

    def runner(self, parts: Sequence[ModelPart]) -> Runner | None:
        """Return what runs the microbatches; None: they run one after another."""
        return None

    def begin(self, shards: Sequence[Shard]) -> None:
        """Optimizer and averages are built, and no step was taken.  Raises `PlanError`: there is nothing to do."""

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def end_step(self, step: int, counts: Sequence[float] | None) -> bool:
        """Note the end of `step`, from 0, and return whether masters have changed, which are then published again.
        `counts`: what each part of the world that sums gradients for itself has counted; None: the step was skipped."""
        return False

    def take_rows(self) -> list[tuple[str, int, int]]:
        """Return how many rows this rank sent where only data decide that (`RankSend.rows_of`): of what, number of the
        exchange, rows; of all since this was asked last."""
        return []

    @property
    def is_open(self) -> bool:
        """Whether steps were taken that `end_step` has not brought to their end, the same on all ranks."""
        return False

    def finish(self) -> bool:
        """End what `is_open`, as no step follows; return whether masters have changed, which are then published."""
        return False

    def evaluated(self, gather_weights: Callable[[], None]) -> AbstractContextManager[None]:
        """Let the model have the weights that are evaluated, inside the block.

        `gather_weights` copies masters into the parameters.
        """
        return nullcontext()

    # ── memory, checkpoints ───────────────────────────────────────────────────────────────────────────────────────────

    def state_bytes(self) -> int:
        """Return the bytes that it keeps on the device between steps, beside parameters, gradients, masters and
        optimizer states."""
        return 0

    def offloaded_storages(self) -> Collection[int]:
        """Return the identities of the storages that are not on the device, in a dry run."""
        return ()

    def notes(self) -> list[str]:
        """Return what a dry run should say of it, beside bytes and the collectives of one step."""
        return []

    def checkpoint_shards(self, stored_shards: list[CheckpointShard]) -> list[CheckpointShard]:
        """Return what a checkpoint holds of masters and optimizer states.  `stored_shards` are all of them as a
        training without the technique has them, masters first."""
        return stored_shards

    def state(self) -> dict[str, Any]:
        """Return what must be saved and is no tensor, as JSON."""
        return {}

    def check_state(self, state: JsonObject) -> None:
        """Refuse what `state` cannot have returned.  Raises `CheckpointError`."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned once the checkpoint shards have been filled.  The state is empty where a plan
        without the technique saved."""

    def close(self) -> None:
        """Let go of files and threads; no steps follow."""
