"""The one session of a script, which all its Accelerators and states share."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

from weft.api import Session, SessionInternals, session
from weft.errors import RecipeError
from weft.events import Event, StepEvent

_OPENING: ContextVar[Mapping[str, Any] | None] = ContextVar("_OPENING", default=None)
_SEED: ContextVar[int | None] = ContextVar("_SEED", default=None)
_JOB: ContextVar[SharedJob | None] = ContextVar("_JOB", default=None)


@final
class GradientState:
    """The place of the loop between two optimizer steps, and its loaders. All of a script's are one object."""

    def __new__(cls, gradient_accumulation_plugin: Any = None) -> GradientState:
        job = open_job()
        self = super().__new__(cls) if job is None else job.gradients
        if job is None:
            self._begin()
        if gradient_accumulation_plugin is not None:
            vars(self).update(vars(gradient_accumulation_plugin))
        return self

    def _begin(self) -> None:
        self.sync_gradients = True
        self.num_steps = 1
        self.adjust_scheduler = self.sync_with_dataloader = True
        self.sync_each_batch = False
        self.dataloader_references: list[Any] = [None]
        """Loaders that are being gone through, the innermost last."""

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """How gradients accumulate."""
        names = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
        return {name: getattr(self, name) for name in names}

    @property
    def active_dataloader(self) -> Any:
        """The loader that is being gone through, None outside of all."""
        return self.dataloader_references[-1]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being gone through."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the present batch is the loader's last."""
        return self.in_dataloader and bool(self.active_dataloader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Samples of a last batch that is not full; -1 where nothing says it."""
        return int(self.active_dataloader.remainder) if self.in_dataloader else -1

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @staticmethod
    def _reset_state() -> None:
        GradientState()._begin()


@final
class SharedJob:
    """A session, and what Accelerators have set beside it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.skipped = False
        """Whether the last step of an optimizer was left out, for an overflow in fp16."""
        self.session: Session = session(**settings, on_event=self._note)
        self.gradients = GradientState()
        self.mixed_precision = "no"
        self.plugins: dict[str, Any] = {}
        self.has_begun = False
        """Whether something was prepared."""

    def _note(self, event: Event, model: int) -> None:
        if isinstance(event, StepEvent):
            self.skipped = event.skipped

    @property
    def inside(self) -> SessionInternals:
        """The session's methods for this package, which no loop need call."""
        return SessionInternals(self.session)

    @property
    def is_alone(self) -> bool:
        """Whether no other process sees other samples."""
        return self.session.is_closed or self.session.num_data_ranks == 1

    @property
    def is_single(self) -> bool:
        """Whether there is no other process."""
        return self.session.is_closed or self.session.world_size == 1

    @property
    def is_filled_in(self) -> bool:
        """Whether the present batch is too small for this process to have a sample: what it was handed stands in."""
        batch = self.inside.batch if self.gradients.in_dataloader else None
        return batch is not None and batch.start == batch.stop


def job_of(asked: Mapping[str, Any] | None = None) -> SharedJob:
    """Return the script's job; one is opened where there is none, or where nothing was prepared in one that was opened
    with less.

    Raises:
        RecipeError: the open one has other settings, and models.
    """
    asked, job = asked or {}, open_job()
    if job is not None:
        others = [name for name in asked if name not in job.settings or job.settings[name] != asked[name]]
        if not others:
            return job
        if job.has_begun:
            raise RecipeError(
                f"a second Accelerator asks for another {', '.join(others)} than the first, whose models are under it."
                " Give all Accelerators of a script the same settings, or call accelerator.end_training() between them."
            )
        job.session.close()
    seed = _SEED.get()
    job = SharedJob({**({} if seed is None else {"seed": seed}), **(_OPENING.get() or {}), **asked})
    _JOB.set(job)
    return job


def open_job() -> SharedJob | None:
    """Return the script's job, if one is open."""
    job = _JOB.get()
    return None if job is None or job.session.is_closed else job


def take_seed(seed: int) -> None:
    """Let what models draw be keyed by a seed: of the open session, and of one that is opened later."""
    _SEED.set(seed)
    if (job := open_job()) is not None:
        job.inside.settle(seed=seed)


def leave_job() -> None:
    """Close the session; the next Accelerator opens another."""
    if (job := open_job()) is not None:
        job.session.close()
    _JOB.set(None)


def forget_job() -> None:
    """Close the session, and forget the seed."""
    leave_job()
    _SEED.set(None)


@contextmanager
def opening(**settings: Any) -> Generator[None]:
    """Open the session of Accelerators within with these arguments of `weft.session`, where they do not say otherwise:
    a plan for a script that names none."""
    before = _OPENING.set(settings)
    try:
        yield
    finally:
        _OPENING.reset(before)
