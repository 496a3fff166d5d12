"""Plans timed against each other: where predictions cannot tell them apart and the run is long, a few steps decide."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from weft.config.cluster import Cluster
from weft.config.document import typed
from weft.config.plan import Plan, dump_plan
from weft.config.recipe import Recipe, dump_recipe
from weft.errors import WeftError
from weft.files import cache_folder, write_whole
from weft.formatting import format_seconds
from weft.planning.search import Candidate, PlanChoice, explain_settings
from weft.run.launch import RankInfo
from weft.run.launch.launcher import ForkServer, RankError, launch_function
from weft.run.worker import teams_of
from weft.version import VERSION

MOST_TRIALS = 4
_EARLY_STEPS = 5
"""Steps of every plan before the rounds: one that compiles, three that are timed, and a margin."""
_START_SECONDS = 8.0
"""Time in which the fresh processes of trials start."""
_BUILD_SECONDS = 1.0
"""Time in which they build a plan's model."""
_TURN_SECONDS = 0.15
"""A turn takes a step, or several while they last no longer than this."""
_ROUNDS = range(3, 16)
"""Rounds in which plans take their turns: few where the run is short, and never so few that chance decides."""
_COMPILE_SECONDS = 60.0
"""Time until the blocks of a plan are compiled: 20 to 50 s for decoders on 2 cores (2026-11), and a margin."""
_STOPPED = ("SIGINT", "SIGTERM")
_WORTH = 30
"""Trials may take this part of the predicted run: a thirtieth."""
_SAFE_SHARE = 0.5
"""Share of memory that plans may take together: a step is not tried for its memory here, and a trial must not end the
run."""


def decide_by_trials(
    recipe: Recipe,
    choice: PlanChoice,
    machine: Cluster,
    *,
    log: Callable[[str], None],
    folder: Path | None = None,
    steps: int | None = None,
    fork_server: ForkServer | None = None,
) -> PlanChoice:
    """Return the choice with the fastest of its close rivals as the plan, compiled and in one microbatch where it pays,
    and the times as the reasons.

    Nothing is tried inside a job, where the ranks run already, or where no samples can be made up (a factory's model).
    Rivals are tried where no plan is clearly the best, the rest where the plan says nothing of it, and all only where
    the run is long enough for that to pay: the longer it is, the more often they take their turns.  What was measured
    is kept by a hash of recipe, machine, plans and version.

    Args:
        log: gets a line before each trial.
        folder: of kept measurements; by default `~/.cache/weft/auto`.
        steps: of the run, where it is not the recipe's.
        fork_server: of the processes that try plans; by default each trial starts one.
    """
    if not choice.rivals or recipe.model.factory is not None or RankInfo.from_environment() is not None:
        return choice
    steps = steps or recipe.run.steps
    bench = _TrialBench(recipe, machine, log, folder or cache_folder("auto"), fork_server)
    return _compiled(bench, _fastest(bench, choice, steps), steps)


def _fastest(bench: _TrialBench, choice: PlanChoice, steps: int) -> PlanChoice:
    """The choice with the fastest of its close rivals first."""
    close = close_rivals(choice)
    plans = [candidate.plan for candidate in close if candidate.plan is not None]
    rounds = _affordable_rounds(plans, [candidate.prediction.step_seconds for candidate in close], steps)
    if len(close) < 2 or rounds is None:
        return choice
    timed = bench.times(plans, rounds, together=_fit_together(close))
    if all(trial is None for trial in timed):
        return choice
    return _decided(bench, choice, close, [None if trial is None else trial.step_seconds for trial in timed])


def _compiled(bench: _TrialBench, choice: PlanChoice, steps: int) -> PlanChoice:
    """The choice with its blocks compiled, or in fewer and larger microbatches, or both: whichever of these trials ends
    the run first, compiling included.

    Both belong together: what a compiler saves grows with the microbatch, and what caches save shrinks.
    """
    first, plan = choice.rivals[0], choice.rivals[0].plan or choice.plan
    variants = _variants(first, plan)
    rounds = _affordable_rounds(variants, [first.prediction.step_seconds] * len(variants), steps)
    if len(variants) < 2 or rounds is None:
        return choice
    timed = bench.times(variants, rounds, together=_fit_together([first] * len(variants)))
    ends = {at: trial.first_seconds + (steps - 1) * trial.step_seconds for at, trial in enumerate(timed) if trial}
    if not ends:
        return choice
    best = min(ends, key=lambda at: ends[at])
    times = [
        f"{_setting(variants[at])}: {format_seconds(trial.step_seconds)}" for at, trial in enumerate(timed) if trial
    ]
    chosen, reason = variants[best], f"measured per step, {', '.join(times)}"
    reasons = {**choice.reasons, "compute.compile": reason}
    if chosen.microbatch != plan.microbatch:
        reasons["microbatch.size"] = "measured, see compute.compile"
    rivals = (replace(first, plan=chosen), *choice.rivals[1:])
    return replace(choice, plan=chosen, reasons=reasons, rivals=rivals)


def _affordable_rounds(plans: Sequence[Plan], seconds: Sequence[float], steps: int) -> int | None:
    """Rounds of trials that the predicted run pays for; None where it is too short for the fewest."""
    # Trials may take 1 / `_WORTH` of the predicted run: the rest of it goes into rounds.
    fixed = _START_SECONDS + sum(
        _BUILD_SECONDS + _EARLY_STEPS * second + _COMPILE_SECONDS * plan.compute.compile
        for plan, second in zip(plans, seconds, strict=True)
    )
    round_seconds = sum(max(second, _TURN_SECONDS) for second in seconds)
    rounds = int((steps * seconds[0] / _WORTH - fixed) / round_seconds) if seconds else 0
    return None if rounds < _ROUNDS.start else min(rounds, _ROUNDS.stop - 1)


def _fit_together(candidates: Sequence[Candidate]) -> bool:
    """Whether all of them surely have room in memory side by side."""
    needed = sum(candidate.prediction.fullest.device for candidate in candidates)
    return needed <= _SAFE_SHARE * min(candidate.prediction.device_bytes for candidate in candidates)


def _variants(candidate: Candidate, plan: Plan) -> list[Plan]:
    """The plan; with one microbatch per data rank where memory surely allows it; and both of these compiled."""
    variants, whole = [plan], plan.microbatch.joined()
    room = candidate.prediction.usable_bytes / candidate.prediction.fullest.device
    grown = whole.size / plan.microbatch.size
    # Memory grows at most as the microbatch does.
    if 1 < grown <= room and plan.mesh.pipeline == 1 and "microbatch.size" not in plan.origins:
        variants.append(replace(plan, microbatch=whole))
    if "compute.compile" not in plan.origins and not plan.pipeline_parallel.splits_backward:
        variants += [replace(variant, compute=replace(variant.compute, compile=True)) for variant in variants]
    return variants


def _setting(plan: Plan) -> str:
    return f"{'compiled, ' if plan.compute.compile else ''}microbatch {plan.microbatch.size}"


def close_rivals(choice: PlanChoice) -> list[Candidate]:
    """The chosen one, and others that differ in axes, ZeRO stage or precision and whose predicted step is within the
    spread of its own; the best of each, at most four."""
    best_by_kind: dict[object, Candidate] = {}
    for rival in choice.rivals:
        limit = choice.rivals[0].prediction.step_seconds * (1 + choice.rivals[0].prediction.spread)
        # Within the spread predictions cannot tell plans apart; of each kind the best comes first.
        if rival.plan is not None and rival.prediction.step_seconds <= limit:
            best_by_kind.setdefault(_kind(rival.plan), rival)
    return list(best_by_kind.values())[:MOST_TRIALS]


def _kind(plan: Plan) -> tuple[object, ...]:
    mesh = plan.mesh
    return mesh.data, mesh.tensor, mesh.pipeline, plan.data_parallel.stage_name, plan.compute.precision


class _TrialTiming(NamedTuple):
    """Times of a trial."""

    step_seconds: float
    first_seconds: float


@dataclass(frozen=True, slots=True)
class _TrialBench:
    """The processes on which plans are tried, and the times that are kept."""

    recipe: Recipe
    machine: Cluster
    log: Callable[[str], None]
    folder: Path
    fork_server: ForkServer | None

    def times(self, plans: Sequence[Plan], rounds: int, *, together: bool) -> list[_TrialTiming | None]:
        """Time the plans, or read what was kept; None for one that failed, which is said and not kept.

        They take turns where all have room in memory `together`; else they run one after another, which a change of the
        machine's pace can mislead.
        """
        path = self.folder / f"{_key(self.recipe, self.machine, plans)}.json"
        kept = _kept(path, len(plans))
        if kept is not None:
            return [*kept]
        for number, plan in enumerate(plans):
            self.log(f"trial     {number + 1} of {len(plans)}: {_name(plan)}, {_setting(plan)}")
        timings = self._in_turn(plans, rounds) if together else None
        if timings is None:
            timings = [timing for plan in plans for timing in self._in_turn([plan], rounds) or [None]]
        if None not in timings:
            _keep(path, {"plans": [_name(plan) for plan in plans], "seconds": timings})
        return timings

    def _in_turn(self, plans: Sequence[Plan], rounds: int) -> list[_TrialTiming | None] | None:
        """Time plans together; None where a rank died, and with it all of them."""
        try:
            timed = time_plans(self.recipe, plans, rounds=rounds, fork_server=self.fork_server)
        except WeftError as problem:
            if isinstance(problem, RankError) and problem.kind in _STOPPED:
                raise  # somebody wants the whole command to end
            self.log(f"          failed: {str(problem).splitlines()[0]}")
            return None
        for plan, trial in zip(plans, timed, strict=True):
            if isinstance(trial, str):
                self.log(f"          {_name(plan)} failed: {trial}")
        ran = [trial for trial in timed if isinstance(trial, TimedPlan)]
        steps = iter(step_seconds(ran))
        return [
            _TrialTiming(next(steps), trial.first_seconds) if isinstance(trial, TimedPlan) else None for trial in timed
        ]


def _decided(
    bench: _TrialBench, choice: PlanChoice, close: Sequence[Candidate], seconds: Sequence[float | None]
) -> PlanChoice:
    """The choice with the fastest plan first; its axes' reason is what was measured."""
    timed = sorted((value, at) for at, value in enumerate(seconds) if value is not None)
    best = close[timed[0][1]]
    assert best.plan is not None
    rivals = (best, *(rival for rival in choice.rivals if rival is not best))
    reasons = explain_settings(best.plan, bench.recipe, bench.machine, rivals)
    key = next(key for key in reasons if key.startswith("mesh."))
    others = [f"{_name(close[at].plan)}: {format_seconds(value)}" for value, at in timed[1:]]
    reasons[key] = ", ".join([f"measured {format_seconds(timed[0][0])} per step", *others])
    own_reasons = {name: why for name, why in reasons.items() if name not in best.plan.origins}
    return replace(choice, plan=best.plan, reasons=own_reasons, rivals=rivals)


def _name(plan: Plan | None) -> str:
    assert plan is not None
    mesh = plan.mesh
    axes = (("data", mesh.data), ("tensor", mesh.tensor), ("pipeline", mesh.pipeline))
    name = " × ".join(f"{axis} {size}" for axis, size in axes if size > 1) or "1 process"
    stage = f" {plan.data_parallel.stage_name}" if mesh.data > 1 else ""
    return f"{name}{stage} {plan.compute.precision}"


def _key(recipe: Recipe, machine: Cluster, plans: Sequence[Plan]) -> str:
    """Return the key of kept times: neither the data nor the folders are part of it."""
    matters = Recipe(
        model=recipe.model, batch=recipe.batch, optimizer=recipe.optimizer, permit=recipe.permit, run=recipe.run
    )
    texts = [VERSION, machine.digest, dump_recipe(matters), *(dump_plan(plan) for plan in plans)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _kept(path: Path, count: int) -> list[_TrialTiming] | None:
    """Return the times of an earlier measurement; None where there is none that can be read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        content: dict[str, Any] = json.loads(path.read_text())
        timings = [_TrialTiming(float(step), float(first)) for step, first in content["seconds"]]
        if len(timings) == count:
            return timings
    return None


def _keep(path: Path, content: Mapping[str, Any]) -> None:
    """Write a measurement; a folder that cannot be written only means that it is made again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1))


MOST_IN_TURN = 4
"""Plans that go on after their first steps, unless the caller wants more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """Times of a plan's steps, until the last rank had finished each."""

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
    going = [trial for trial in timed if trial.turns]
    means = [geometric_mean(turns) for turns in zip(*(trial.turns for trial in going), strict=True)]
    return [
        median(turn / mean for turn, mean in zip(trial.turns, means, strict=True)) * median(means)
        if trial.turns
        else trial.early_seconds
        for trial in timed
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
    """Return one result for a team's ranks; times are agreed already, peaks are each rank's own."""
    failed = [rank["failure"] for rank in ranks if "failure" in rank]
    if failed:
        return failed[0]
    return replace(typed(TimedPlan, ranks[0]), peak_bytes=max(rank["peak_bytes"] for rank in ranks))
