"""Write a script's numbers to trackers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from weft.accelerate._installed import is_installed
from weft.accelerate._job import job_of, leave_job
from weft.accelerate._saving import AcceleratorSaves
from weft.errors import RecipeError


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a tracker's method do nothing but on rank 0, if the tracker says so by `main_process_only`."""

    @functools.wraps(function)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_main = job_of().session.rank == 0
        return function(self, *args, **kwargs) if is_main or not getattr(self, "main_process_only", True) else None

    return called


class GeneralTracker:
    """A tracker of one's own has a `name`, a `tracker`, `store_init_configuration` and `log`."""

    main_process_only: ClassVar[bool] = True
    requires_logging_directory: bool = False
    name: str = ""

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [
            attribute
            for attribute in ("name", "tracker")
            if not hasattr(type(self), attribute) and not hasattr(self, attribute)
        ]
        if missing or not self.name:
            raise NotImplementedError(f"{type(self).__name__} says no {missing[0] if missing else 'name'}. Add it.")

    def start(self) -> None:
        """Begin."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep what the run was begun with."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers."""

    def finish(self) -> None:
        """End."""


class TensorBoardTracker(GeneralTracker):
    """Writes to TensorBoard."""

    name = "tensorboard"
    requires_logging_directory = True

    @on_main_process
    def __init__(self, run_name: str, logging_dir: Any, **kwargs: Any) -> None:
        super().__init__(_blank=True)
        self.run_name, self.logging_dir, self._kwargs = run_name, Path(logging_dir) / run_name, kwargs

    @on_main_process
    def start(self) -> None:
        """Open the file."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.logging_dir), **self._kwargs)

    @property
    def tracker(self) -> Any:
        """The writer itself."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep what the run was begun with."""
        kept = {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}
        self.writer.add_hparams(kept, metric_dict={})
        self.writer.flush()

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers, texts, and dictionaries of numbers."""
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
        self.writer.flush()

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        self.writer.close()


class WandBTracker(GeneralTracker):
    """Writes to Weights & Biases."""

    name = "wandb"

    @on_main_process
    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(_blank=True)
        self.run_name, self._kwargs = run_name, kwargs

    @on_main_process
    def start(self) -> None:
        """Begin a run."""
        wandb: Any = importlib.import_module("wandb")

        self.run: Any = wandb.init(project=self.run_name, **self._kwargs)

    @property
    def tracker(self) -> Any:
        """The run itself."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep what the run was begun with."""
        self.run.config.update(dict(values), allow_val_change=True)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Send numbers."""
        self.run.log(dict(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()


_TRACKERS: Mapping[str, tuple[str, type[GeneralTracker]]] = {
    "tensorboard": ("tensorboard", TensorBoardTracker),
    "wandb": ("wandb", WandBTracker),
}


def trackers_of(log_with: Any, logging_dir: Any) -> list[Any]:
    """Return names and objects of the trackers that are asked for.

    Raises:
        RecipeError: one is not had, or its library is not installed.
    """
    asked: Sequence[Any] = log_with if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
    trackers: list[Any] = []
    for tracker in asked:
        if isinstance(tracker, GeneralTracker):
            trackers.append(tracker)
        elif str(tracker) == "all":
            trackers += [name for name, (library, _) in _TRACKERS.items() if is_installed(library)]
        elif str(tracker) not in _TRACKERS:
            raise RecipeError(
                f"log_with={str(tracker)!r} is not had; known are {', '.join(_TRACKERS)}, all, and objects of your own"
                " class of weft.accelerate.tracking.GeneralTracker, with its name, start, log and finish."
            )
        elif not is_installed(_TRACKERS[str(tracker)][0]):
            raise RecipeError(
                f"log_with={str(tracker)!r} needs a library that is not installed: pip install {tracker}."
            )
        else:
            trackers.append(str(tracker))
    for name in [tracker for tracker in trackers if isinstance(tracker, str)]:
        if _TRACKERS[name][1].requires_logging_directory and logging_dir is None:
            raise ValueError(f"log_with={name!r} writes into a folder. Give Accelerator(project_dir=…).")
    return trackers


class Tracking(AcceleratorSaves):
    """`init_trackers`, `log` and `end_training`."""

    trackers: list[Any]
    log_with: list[Any]

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begin to track under a name, with what the run was begun with."""
        for tracker in self.log_with:
            if isinstance(tracker, str):
                kind: Any = _TRACKERS[tracker][1]
                folder = [self.logging_dir] if kind.requires_logging_directory else []
                tracker = kind(project_name, *folder, **dict((init_kwargs or {}).get(tracker, {})))
            self.trackers.append(tracker)
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name, or what it writes with."""
        matching = next((tracker for tracker in self.trackers if tracker.name == name), None)
        if matching is None and self.is_main_process:
            known = ", ".join(tracker.name for tracker in self.trackers) or "none"
            raise ValueError(f"there is no tracker {name!r}. Known are {known}; call init_trackers before.")
        if matching is None or not self.is_main_process:
            return GeneralTracker(_blank=True)
        return matching.tracker if unwrap else matching

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Give numbers to every tracker."""
        for tracker in self.trackers:
            tracker.log(values, step=step, **dict((log_kwargs or {}).get(tracker.name, {})))

    def end_training(self) -> None:
        """End the trackers, and leave the job; models are plain then."""
        for tracker in self.trackers:
            tracker.finish()
        leave_job()
