"""A session's part in a job that `weft launch` starts again: what it tells its supervisor, and what it is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, final

from weft.comm.mesh import Mesh
from weft.config.document import plain
from weft.config.plan import ModelFacts, Plan, parse_plan
from weft.config.recipe import Recipe
from weft.events import FolderToken
from weft.events.progress import ProgressRow
from weft.run.engine import StopRequest
from weft.run.launch import HAND_OVER, RankInfo
from weft.run.launch.generation import ScriptGeneration, SessionReport

if TYPE_CHECKING:
    from weft.run.worker.faults import FaultInjector


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedPlan:
    """What a function given to `session.on_change` is told."""

    old: Plan
    """The plan that the ranks were under."""
    new: Plan
    """The plan that they are under now, as many as it has."""
    step: int
    """Finished steps, after which it was changed."""


OnChange = Callable[[ReplacedPlan], object]


@final
class SupervisedSession:
    """One session of a rank whose supervisor may start the script again.  Calls are made on every rank alike."""

    def __init__(self, generation: ScriptGeneration, rank_info: RankInfo) -> None:
        """Install nothing yet."""
        self._generation, self._rank_info = generation, rank_info
        self._report = SessionReport(has_saved=bool(generation.run))
        self._stop = StopRequest(announce=rank_info.rank == 0)
        self._leaving: list[Callable[[], object]] = []
        self._callbacks: list[OnChange] = []
        self._change: ReplacedPlan | None = None
        self._injector: FaultInjector | None = None
        if generation.faults is not None and self.folder is not None:
            from weft.run.worker.faults import FaultInjector  # loaded under `weft chaos` alone

            self._injector = FaultInjector.of_json(generation.faults, rank_info.rank, self.folder, self.memory)

    @property
    def folder(self) -> Path | None:
        """Folder of the run, whatever the script says: of the one that is gone on with; None: as the script says."""
        folder = self._generation.run or self._generation.folder
        return Path(folder) if folder else None

    def reach(self, phase: str) -> None:
        """The rank has come to a phase, at which `weft chaos` may do something."""
        if self._injector is not None:
            self._injector.reach(phase)

    def progress(self) -> ProgressRow | None:
        """Where the launcher reads how far the rank is."""
        row = self._rank_info.progress_row()
        return row if self._injector is None else self._injector.progress(row)

    @property
    def token(self) -> FolderToken | None:
        """The right to write in the run's folder, which the host that leads owns, where the job has several; None: the
        session takes the folder itself."""
        owner, folder = self._generation.owner, self.folder
        return None if owner is None or folder is None else FolderToken.of_json(folder, owner)

    @property
    def plan(self) -> Plan | None:
        """The plan that the session is under, whatever the script says; None: as it says."""
        return parse_plan(self._generation.plan) if self._generation.plan else None

    @property
    def memory(self) -> Path | None:
        """The supervisor's folder in the host's memory, for snapshots; None where the host has none."""
        return Path(self._generation.memory) if self._generation.memory else None

    @property
    def ranks_on_host(self) -> int:
        """Ranks that share the host's memory."""
        return self._rank_info.local_world_size

    @property
    def failure_seconds(self) -> float:
        """Mean time between failures so far, in seconds."""
        return self._generation.failure_seconds

    @property
    def is_set(self) -> bool:
        """Whether the session's terms are set from outside, and its plan has been shown and proven."""
        return self.goes_on or self._generation.faults is not None or bool(self._generation.plan)

    @property
    def goes_on(self) -> bool:
        """Whether this generation goes on from what an earlier one has saved."""
        return bool(self._generation.run)

    # ── what the supervisor is told ───────────────────────────────────────────────────────────────────────────────────

    def prepared(self, recipe: Recipe, facts: ModelFacts) -> None:
        """The session's first model was prepared, with a loss: it can be gone on with, and be stopped between steps."""
        batch_size, told = recipe.batch.global_batch_size, {"recipe": plain(recipe), "facts": plain(facts)}
        self._tell(replace(self._report, num_models=1, batch_size=batch_size, **told))
        self._stop.take(HAND_OVER)
        if self._report.has_saved:
            self._take_sigterm()

    def prepared_another(self) -> None:
        """A further model was prepared: saves of several are apart, so the session cannot be gone on with."""
        self._tell(replace(self._report, num_models=2))
        self._stop.__exit__()

    @property
    def has_saved(self) -> bool:
        """Whether the newest save in the run's folder is of this run."""
        return self._report.has_saved

    def saved(self) -> None:
        """The newest save in the run's folder is of this session, or was loaded by it."""
        self._tell(replace(self._report, has_saved=True))
        self._take_sigterm()

    def _take_sigterm(self) -> None:
        # Without a save SIGTERM ends a script as it always did; a handler of the user's own stays.
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._stop.take(signal.SIGTERM)

    def _tell(self, report: SessionReport) -> None:
        self._report = report
        if self._rank_info.rank == 0:
            report.write(self._rank_info)

    # ── stopping ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def can_stop(self) -> bool:
        """Whether the session's only model can be saved for another generation."""
        return self._report.num_models == 1

    @property
    def stop_flag(self) -> float:
        """1.0 when this rank was asked to stop, else 0.0: to be summed over all ranks, once per step."""
        return self._stop.flag if self.can_stop else 0.0

    def agreed_signal(self, mesh: Mesh) -> int:
        """Return the signal that some rank got.  Collective."""
        return self._stop.agreed(mesh.device, mesh["world"].group)

    def on_leaving(self, close: Callable[[], object]) -> None:
        """Say how the session is closed before the rank leaves."""
        self._leaving.append(close)

    def leave(self) -> NoReturn:
        """Close the session and end the script with status 75: everything is saved.  All ranks do it at one step."""
        for close in self._leaving:
            close()
        raise SystemExit(os.EX_TEMPFAIL)

    # ── another plan ──────────────────────────────────────────────────────────────────────────────────────────────────

    def on_change(self, callback: OnChange) -> None:
        """See `Session.on_change`."""
        self._callbacks.append(callback)
        if self._change is not None:
            callback(self._change)

    def went_on(self, step: int, plan: Plan) -> None:
        """The model was filled with what was saved after `step` steps."""
        if self._generation.before:
            self._change = ReplacedPlan(old=parse_plan(self._generation.before), new=plan, step=step)
            for callback in self._callbacks:
                callback(self._change)
