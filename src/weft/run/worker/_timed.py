"""One rank that steps several plans in turn: what `time_plans` launches.

Ranks form teams, one per size of world and backend, each with a process group of its own.  Only one team works at a
time; the others wait for a byte in their FIFO, which costs nothing while they do.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from weft.analysis.blueprint import build_blueprint
from weft.comm.device import peak_memory_bytes, synchronize
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import Plan, parse_plan
from weft.config.recipe import Recipe, learning_rate, parse_recipe
from weft.errors import WeftError
from weft.run.engine import create_training
from weft.run.launch import RankInfo, initialise_distributed
from weft.run.worker._trial_data import TrialData
from weft.run.worker._trial_teams import team_of, teams_of

_EARLY_STEPS = 3
_EARLY_SECONDS = 1.0
"""Time after which a plan takes no more of them: how slow it is has been seen."""
_TURN_SECONDS = 0.05
"""A turn lasts so long where steps are shorter: a clock and a scheduler say little of a single one."""
_MOST_STEPS = 20


class _BuiltTrial:
    """A plan that has been built on this rank, and runs step by step."""

    def __init__(self, recipe: Recipe, plan: Plan, device: torch.device) -> None:
        self._recipe, self._plan, self._device = recipe, plan, device
        torch.set_num_threads(plan.compute.num_threads)
        mesh = Mesh(plan.mesh, device, timeout_seconds=plan.compute.timeout_seconds)
        blueprint = build_blueprint(recipe, plan)
        self._training = create_training(recipe, plan, blueprint, mesh, Recorder())
        label_range = getattr(recipe.model.shape, "num_classes", None)
        self._data = TrialData(
            blueprint, plan, data_index=mesh.data_index, seed=recipe.run.seed, label_range=label_range
        )
        self._step = 0

    def close(self) -> None:
        """End what runs beside the steps."""
        self._training.close()

    def steps(self, count: int) -> float:
        """Take steps that all ranks begin together; seconds of one, by the slowest rank, the same on all."""
        torch.set_num_threads(self._plan.compute.num_threads)
        steps = range(self._step, self._step + count)
        # Batches are made before the clock starts: a training prefetches them, so they are no part of its step.
        batches = [self._data.microbatches(step) for step in steps]
        _agreed(0.0, self._device)
        began = time.perf_counter()
        for step, batch in zip(steps, batches, strict=True):
            self._training.stepper(batch, step=step, learning_rate=learning_rate(self._recipe, step))
        synchronize(self._device)
        self._step += count
        return _agreed((time.perf_counter() - began) / count, self._device)


def _agreed(seconds: float, device: torch.device) -> float:
    """The largest over the team, which waits for the last."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seconds
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


@dataclass(frozen=True, slots=True)
class _Turns:
    """The turns of several teams.  Every rank walks through the same turns, and works in those of its own team."""

    folder: Path
    rank: int
    team: int
    """Its number."""
    members: Sequence[range]
    """Ranks of every team."""

    def walk(self, turns: Sequence[tuple[int, int]], work: Callable[[int], None]) -> None:
        """Do `work(plan)` for every turn (team, plan) of this rank's team, never while another team works."""
        # Teams that wait must not compute, nor poll: cores are shared.  So they sleep on a FIFO until the team before
        # ends.
        for position, (team, plan) in enumerate(turns):
            if team != self.team:
                continue
            if position > 0 and turns[position - 1][0] != team:
                self.wait()
            work(plan)
            after = turns[position + 1 : position + 2]
            if after and after[0][0] != team:
                self._give(self.members[after[0][0]])

    def meet(self, last: int) -> None:
        """Wait until the team that had the last turn is through with it."""
        if self.team == last:
            self._give(range(self.members[-1].stop))
        self.wait()

    def wait(self) -> None:
        """Sleep until a byte comes."""
        mine = os.open(self.folder / f"turn{self.rank}", os.O_RDONLY)
        try:
            os.read(mine, 1)
        finally:
            os.close(mine)

    def _give(self, ranks: Sequence[int]) -> None:
        """The first rank of the team that ends wakes those of the next; the parent keeps what nobody has read yet."""
        if self.rank != self.members[self.team][0]:
            return
        for rank in ranks:
            with open(self.folder / f"turn{rank}", "wb", buffering=0) as pipe:
                pipe.write(b".")


def run_rank(
    rank_info: RankInfo, *, recipe: str, plans: list[str], rounds: int, most: int, always: int, folder: str
) -> dict[str, dict[str, Any]]:
    """Run one rank; `recipe` and `plans` are TOML.  Returns the timings of its own team's plans."""
    what, known = parse_recipe(recipe), [parse_plan(text) for text in plans]
    every = teams_of(known)
    sizes = [world_size for world_size, _ in every]
    starts = [sum(sizes[:team]) for team in range(len(sizes))]
    members = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    team = next(team for team, ranks in enumerate(members) if rank_info.rank in ranks)
    rank = rank_info.rank - starts[team]
    own = RankInfo(rank, sizes[team], rank, sizes[team], store=str(Path(folder) / f"store{team}"))
    turns = _Turns(Path(folder), rank_info.rank, team, members)
    timeout_seconds = max(plan.compute.timeout_seconds for plan in known)
    device, backend = known[0].compute.device, every[team][1]
    with initialise_distributed(device, own, backend=backend, timeout_seconds=timeout_seconds) as distributed:
        bench = _TimedTrials(what, known, turns, distributed.device, {}, {})
        teams = [every.index(team_of(plan)) for plan in known]
        bench.begin(teams)
        going = _going_on(bench.early(), most, always)
        bench.go_on(teams, going, rounds)
        for running in bench.running.values():
            running.close()
        return {str(at): timing for at, timing in bench.found.items()}


def _going_on(early: dict[int, float], most: int, always: int) -> list[int]:
    """The first plans and the fastest ones, of those that run."""
    ranked = sorted(early, key=lambda at: early[at])
    return list(dict.fromkeys([*(at for at in range(always) if at in early), *ranked[:most]]))


@dataclass(frozen=True, slots=True)
class _TimedTrials:
    """The trials that a rank has built, and their timings, by the index of the plan."""

    recipe: Recipe
    plans: Sequence[Plan]
    turns: _Turns
    device: torch.device
    running: dict[int, _BuiltTrial]
    found: dict[int, dict[str, Any]]

    def begin(self, teams: Sequence[int]) -> None:
        """Build every plan and take its first steps; then wait until all teams have."""
        self.turns.walk([(team, at) for at, team in enumerate(teams)], self._start)
        self.turns.meet(last=teams[-1])

    def early(self) -> dict[int, float]:
        """Early seconds of every plan that runs, also of the other teams'."""
        kept = {at: self._path(at) for at in range(len(self.plans))}
        return {at: json.loads(path.read_text()) for at, path in kept.items() if path.exists()}

    def go_on(self, teams: Sequence[int], going: Sequence[int], rounds: int) -> None:
        """Step the plans that go on in turn; the order is turned round from round to round."""
        for at in [at for at in self.running if at not in going]:
            self.running.pop(at).close()
        # A machine that grows slower during a round would otherwise always favour the plan that comes first.
        there, back = [(teams[at], at) for at in going], [(teams[at], at) for at in reversed(going)]
        self.turns.walk([turn for number in range(rounds) for turn in (back if number % 2 else there)], self._turn)

    def _start(self, at: int) -> None:
        try:
            running = _BuiltTrial(self.recipe, self.plans[at], self.device)
            # The first step is apart: it allocates, compiles and connects.
            first = running.steps(1)
            early = [running.steps(1)]
            while len(early) < _EARLY_STEPS and sum(early) < _EARLY_SECONDS:
                early.append(running.steps(1))
        except WeftError as problem:  # refused alike on every rank
            self.found[at] = {"failure": str(problem).splitlines()[0]}
            return
        self.running[at] = running
        peak = peak_memory_bytes(self.device)
        seconds = median(early)
        self.found[at] = {"first_seconds": first, "early_seconds": seconds, "turns": [], "peak_bytes": peak}
        if self.turns.rank == self.turns.members[self.turns.team][0]:
            self._path(at).write_text(json.dumps(seconds))

    def _turn(self, at: int) -> None:
        """Take one step, or several where they are short."""
        steps = min(round(_TURN_SECONDS / self.found[at]["early_seconds"]), _MOST_STEPS)
        if steps > 0:  # several short steps: the first one loads the caches, which the plan before has filled
            self.running[at].steps(1)
        self.found[at]["turns"].append(self.running[at].steps(max(1, steps)))

    def _path(self, at: int) -> Path:
        return self.turns.folder / f"early{at}.json"
