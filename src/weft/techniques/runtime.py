"""The runtime half of a technique's contract, which needs torch: hooks on every rank.

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
    """The arguments of every technique's `create`, before the model is built; the same on all ranks except the mesh."""

    blueprint: Blueprint
    plan: Plan
    mesh: Mesh
    dtypes: Dtypes
    context: StepContext
    draws: Draws
    """The random draws that the model and its loss make by functions."""
    seed: int
    whole_batch: WholeBatch | None = None
    """The gathers of a loss that is no sum over samples; None: it is one, or there is one data rank."""
    momentum_decay: float | None = None
    """β₁ of an AdamW that can freeze its variance; None: another optimizer."""
    num_steps: int | None = None
    """Number of steps of the training; None: a user's own loop decides."""
    folder: Path | None = None
    """The folder of the run's files; None: there is no run."""


class TechniqueRuntime:
    """One technique on one rank.  A subclass overrides the hooks that it needs; the others do nothing.

    Every hook is called on every rank alike, in the order in which they stand here.
    """

    changes_masters: ClassVar[bool] = False
    """Whether `end_step` may change masters; then weights must not be gathered before it."""
    span: ClassVar[str] = ""
    """Name of the recorder's span for `end_step`; empty: the technique does nothing at the end of a step."""
    saved_as: ClassVar[str] = ""
    """Key of `state` in a checkpoint, the same as the contract's; empty: there is no state."""

    # ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def gradient_mesh(self, mesh: Mesh) -> Mesh:
        """Return the mesh over whose data ranks the gradients of a step are summed."""
        return mesh

    def parts(self) -> list[ModelPart] | None:
        """Return the model's stages on this rank; None: the full model is one part."""
        return None

    def split(self, part: ModelPart) -> None:
        """Split a part, which has no storage yet, over ranks, and enter the splits in its layout."""

    def tie_parts(self, parts: Sequence[ModelPart]) -> None:
        """Tie parameters that several parts share.  The parts have storage and initial weights now."""

    def wrap(self, part: ModelPart) -> None:
        """Wrap or replace forwards of a part's modules."""

    def offload_policy(self) -> OffloadPolicy | None:
        """Return `fully_shard`'s policy for shards in the host's memory; None: shards are on the device."""
        return None

    def on_sharded(self, part: ModelPart) -> Callable[[], None] | None:
        """Hear that ZeRO-3 has sharded a part's weights.  Shards that are drawn later have no storage yet.

        Return a function to call after each module whose shards were filled; None: nothing is to be done then.
        """
        return None

    def codec(self) -> CodecSpec | None:
        """Return the codec of gradients; None: they travel in their own dtype."""
        return None

    def attach_shards(self, shards: Sequence[Shard]) -> None:
        """Receive the shards that the optimizer will update, before it is built.

        A technique that offloads masters and states sets itself as the shards' `keeper` here.
        """

    def runner(self, parts: Sequence[ModelPart]) -> Runner | None:
        """Return the runner of microbatches; None: they run one after another."""
        return None

    def begin(self, shards: Sequence[Shard]) -> None:
        """Begin, once optimizer and averages are built and before the first step.

        Raises:
            PlanError: the technique would have nothing to do.
        """

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def end_step(self, step: int, counts: Sequence[float] | None) -> bool:
        """Note the end of `step`, from 0, and return whether masters have changed: weights are then gathered again.

        `counts`: labels or samples that each replica counted, by replica; None: the step was skipped.
        """
        return False

    def take_rows(self) -> list[tuple[str, int, int]]:
        """Return (name, number of the exchange, rows) of the exchanges since the last call whose size depends on data.

        The name is that of `RankSend.rows_of`: a sparse table, or a mixture of experts.
        """
        return []

    @property
    def is_open(self) -> bool:
        """Whether steps were taken that ranks have not agreed on yet; the same on all ranks."""
        return False

    def finish(self) -> bool:
        """Agree on open steps, as no step follows; return whether masters have changed."""
        return False

    def evaluated(self, gather_weights: Callable[[], None]) -> AbstractContextManager[None]:
        """Let the model have the weights that are evaluated, inside the block.

        `gather_weights` copies masters into the parameters.
        """
        return nullcontext()

    # ── memory, checkpoints ───────────────────────────────────────────────────────────────────────────────────────────

    def state_bytes(self) -> int:
        """Return its bytes on the device between steps, besides parameters, gradients, masters and optimizer states."""
        return 0

    def offloaded_storages(self) -> Collection[int]:
        """Return the identities of the storages that would not be on the device, for a dry run."""
        return ()

    def notes(self) -> list[str]:
        """Return sentences for a dry run, besides bytes and the collectives of one step."""
        return []

    def checkpoint_shards(self, stored_shards: list[CheckpointShard]) -> list[CheckpointShard]:
        """Return what a checkpoint holds of masters and optimizer states.  `stored_shards` are all of them as a
        training without the technique has them, masters first."""
        return stored_shards

    def state(self) -> dict[str, Any]:
        """Return the state that is no tensor, as JSON."""
        return {}

    def check_state(self, state: JsonObject) -> None:
        """Raise `CheckpointError` if `state` cannot have returned this."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned once the checkpoint shards have been filled.  The state is empty where a plan
        without the technique saved."""

    def close(self) -> None:
        """Close files and end threads; no steps follow."""
