"""Profiles of some steps of a run, asked for while it goes on.

A rank that is suspected to hold the run back is profiled with a healthy one that does the same work: what an operator
takes says little, and what it takes more than beside it says where to look.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.config.plan import parse_plan
from weft.config.recipe import ProfileRecipe
from weft.errors import LaunchError
from weft.events import RunFolder
from weft.events.profile_request import MOST_STEPS, ProfileRequest, facts_path, window_folder
from weft.watch.accounting import own_times, phase_names, phase_title
from weft.watch.profiles import RankProfile, read_window
from weft.watch.run_record import RunRecord
from weft.watch.store import GenerationFacts, StepWindow
from weft.watch.verdicts import LEAST_STEPS, RunVerdict, peers_of

logger = logging.getLogger(__name__)

_AHEAD_SECONDS = 1.5
"""Time until a window begins: ranks look for it twice a second, and all are to begin behind the same step."""
_WRITE_SECONDS = 60.0
"""Time in which a rank writes its trace."""
_LOOK_SECONDS = 0.1
_MOST_SUSPECTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRanks:
    """Which ranks are profiled, and why."""

    ranks: tuple[int, ...]
    """Each with the rank that is held beside it behind it."""
    why: str


def suspects(verdicts: Iterable[RunVerdict], facts: GenerationFacts, window: StepWindow) -> ProfiledRanks | None:
    """Return the ranks of the costliest verdict that names some, at most three, and one healthy peer; None where no
    rank is suspected."""
    named = next((verdict for verdict in verdicts if verdict.ranks), None)
    if named is None:
        return None
    ranks = named.ranks[:_MOST_SUSPECTS]
    group = next((group for group in peers_of(facts, window.values.shape[1]) if ranks[0] in group), [])
    healthy = [rank for rank in group if rank not in named.ranks]
    beside = (_usual(healthy, window),) if healthy else ()
    phase = f" in {phase_title(named.phase)}" if named.phase else ""
    return ProfiledRanks(ranks=ranks + beside, why=f"suspected{phase}" + (", and a healthy one" if beside else ""))


def _usual(ranks: Sequence[int], window: StepWindow) -> int:
    """Return the rank whose own time lies nearest the median of these."""
    own = np.nanmedian(own_times(window, phase_names(window.columns)).sum(axis=2), axis=0)[list(ranks)]
    return ranks[int(np.nanargmin(np.abs(own - np.nanmedian(own))))] if np.isfinite(own).any() else ranks[0]


def ranks_to_profile(record: RunRecord, asked: str) -> ProfiledRanks:
    """Return the ranks that `suspects`, `all`, or numbers such as `0,3` mean in a run.

    Raises:
        LaunchError: it means none, or ranks that the run has not.
    """
    number = record.num_ranks or (parse_plan(record.plan).mesh.world_size if record.plan else 0)
    if not number:
        raise LaunchError(f"{record.folder.path} has no telemetry and no plan: which ranks the run has is not known.")
    if asked == "all":
        return ProfiledRanks(ranks=tuple(range(number)), why="all")
    if asked == "suspects":
        found = suspects(record.verdicts, record.facts, record.window) if record.is_recorded else None
        return found or ProfiledRanks(ranks=(0,), why="no rank is suspected, so the first")
    try:
        ranks = tuple(dict.fromkeys(int(part) for part in asked.split(",")))
    except ValueError:
        raise LaunchError(f"--ranks {asked} names no ranks. Write suspects, all, or numbers such as 0,3.") from None
    if unknown := [rank for rank in ranks if not 0 <= rank < number]:
        raise LaunchError(f"--ranks {asked}: the run has ranks 0 to {number - 1}, and no rank {unknown[0]}.")
    return ProfiledRanks(ranks=ranks, why="asked for")


def profile_run(record: RunRecord, ranks: Sequence[int], num_steps: int) -> list[RankProfile]:
    """Let ranks of a living run profile some steps, and return what they have written.

    Raises:
        LaunchError: the run does not go on, or no rank has answered in time.
    """
    if not 1 <= num_steps <= MOST_STEPS:
        raise LaunchError(f"--steps {num_steps}: a window has 1 to {MOST_STEPS} steps.")
    if record.state != "running" or not record.steps:
        begun = "is ended" if record.steps else "has done no step"
        raise LaunchError(f"the run in {record.folder.path} {begun}: only steps to come can be profiled.")
    record.refresh()
    usual = max(record.usual_seconds, 1e-3)
    # The newest step is the newest recorded one, which may be a second old.
    after = record.steps[-1].step + math.ceil((_AHEAD_SECONDS + record.silent_seconds) / usual)
    try:
        asked = ProfileRequest(ranks=tuple(ranks), after_step=after, num_steps=num_steps).ask(record.folder)
    except OSError as error:
        raise LaunchError(f"the run's folder cannot be written to: {error.strerror}.") from None
    return _answers(record, asked, _AHEAD_SECONDS + 4 * num_steps * usual + _WRITE_SECONDS)


class OwnProfile:
    """Lets a run profile some of its steps by itself, once after each start of its supervisor (`[run.profile]`)."""

    def __init__(self, run: RunFolder, recipe: ProfileRecipe) -> None:
        self._run, self._recipe = run, recipe
        self._has_asked = recipe.ranks == "none"

    def __call__(self, verdicts: Sequence[RunVerdict], facts: GenerationFacts, window: StepWindow) -> None:
        """See `weft.watch.collector.Judged`."""
        if self._has_asked or len(window.steps) < LEAST_STEPS:
            return
        if self._recipe.ranks == "all":
            chosen = ProfiledRanks(ranks=tuple(range(facts.world_size)), why="all")
        else:
            sure = [verdict for verdict in verdicts if verdict.confidence != "low" and verdict.kind != "hang"]
            chosen = suspects(sure, facts, window)
        if chosen is None:
            return
        self._has_asked = True
        seconds = float(np.nanmedian(np.nanmax(window.column("wall"), axis=1)))
        after = int(window.steps[-1]) + math.ceil(_AHEAD_SECONDS / max(seconds, 1e-3))
        request = ProfileRequest(ranks=chosen.ranks, after_step=after, num_steps=self._recipe.steps)
        try:
            request.ask(self._run)
        except OSError as problem:
            logger.warning("No steps are profiled: %s cannot be written (%s).", self._run.profiles, problem.strerror)


def _answers(record: RunRecord, asked: ProfileRequest, seconds: float) -> list[RankProfile]:
    """Wait for all ranks, until the run or the time is over; return what those have written that have."""
    window = window_folder(record.folder, asked.number)
    deadline = time.monotonic() + seconds
    while not all(facts_path(window, rank).is_file() for rank in asked.ranks) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        record.refresh()
        if record.state != "running":
            break
    if found := read_window(window, asked.ranks):
        return found
    raise LaunchError(
        f"no rank has written a profile in {seconds:.0f} s. Ranks look for requests in {record.folder.profiles}: the"
        " run may have ended, or stand still."
    )
