"""Plans timed against each other, in turn, in fresh processes that hold them all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from weft.config.document import typed
from weft.config.plan import Plan, dump_plan
from weft.config.recipe import Recipe, dump_recipe
from weft.run.launch.launcher import ForkServer, launch_function
from weft.run.worker import teams_of

MOST_IN_TURN = 4
"""Plans that go on after their first steps, unless the caller wants more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """What the steps of a plan took, until the last rank had finished each."""

    first_seconds: float
    """Time of the first step of all, which compiles and opens connections."""
    early_seconds: float
    """Time of a step, by the median of the few that follow, which every plan takes."""
    turns: tuple[float, ...]
    """Time of a step in each round; none where the plan was too slow to go on."""
    peak_bytes: int
    """The largest peak of a rank up to there: allocated on an accelerator, resident on cores.  Only the first plan's
    is its own; ranks keep what they have built."""


def time_plans(
    recipe: Recipe,
    plans: Sequence[Plan],
    *,
    rounds: int,
    most: int = MOST_IN_TURN,
    always: int = 1,
    fork_server: ForkServer | None = None,
) -> list[TimedPlan | str]:
    """Take a few steps under every plan; then the first `always` and the `most` fastest again, in turn, `rounds` times.

    The machine is not equally fast at all times (other work, heat), and what it does to one round it does to all plans
    of that round: compare `turns` round by round (`step_seconds`).  Plans of one world and backend share processes.
    All plans stay in memory side by side.  The ranks end with the call.

    Returns:
        Per plan what was measured, or why a rank refused it.

    Raises:
        RankError: a rank died, or raised an error that is not Weft's.
    """
    num_ranks = sum(world_size for world_size, _ in teams_of(plans))
    with tempfile.TemporaryDirectory(prefix="weft-trials-") as folder:
        arguments = {
            "recipe": dump_recipe(recipe, everything=True),
            "plans": [dump_plan(plan, everything=True) for plan in plans],
            "rounds": rounds,
            "most": most,
            "always": always,
            "folder": folder,
        }
        threads = max(plan.compute.num_threads for plan in plans)
        function = "weft.run.worker._timed:run_rank"
        preload = ("weft.api", "torch.distributed.tensor")
        with _pipes([Path(folder) / f"turn{rank}" for rank in range(num_ranks)]):
            timings = launch_function(
                function, arguments, num_ranks, threads_per_rank=threads, preload=preload, fork_server=fork_server
            )
    return [_merged([rank[str(at)] for rank in timings if str(at) in rank]) for at in range(len(plans))]


def step_seconds(timed: Sequence[TimedPlan]) -> list[float]:
    """Seconds of a step of each plan, comparable although the machine's pace changes from round to round.

    A plan's turn is held against the mean of its round, and the median of these ratios counts, times the median round.
    Plans that did not go on are judged by their early steps.
    """
    # Another program slows all plans of a round alike, so the ratio to the round's mean is steady where the seconds are
    # not.  The mean is geometric: a plan that is twice as slow and one that is twice as fast then cancel out.
    going = [each for each in timed if each.turns]
    means = [geometric_mean(turns) for turns in zip(*(each.turns for each in going), strict=True)]
    return [
        median(turn / mean for turn, mean in zip(each.turns, means, strict=True)) * median(means)
        if each.turns
        else each.early_seconds
        for each in timed
    ]


@contextmanager
def _pipes(paths: Sequence[Path]) -> Generator[None]:
    """FIFOs, held open at both ends, so that neither end waits for the other to open it and nothing is lost."""
    pipes: list[int] = []
    try:
        for path in paths:
            os.mkfifo(path, 0o600)
            pipes.append(os.open(path, os.O_RDWR))
        yield
    finally:
        for pipe in pipes:
            os.close(pipe)


def _merged(ranks: Sequence[Mapping[str, Any]]) -> TimedPlan | str:
    """What the ranks of a team say of a plan; times are agreed already, peaks are each rank's own."""
    failed = [rank["failure"] for rank in ranks if "failure" in rank]
    if failed:
        return failed[0]
    return replace(typed(TimedPlan, ranks[0]), peak_bytes=max(rank["peak_bytes"] for rank in ranks))
