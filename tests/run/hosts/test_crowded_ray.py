"""A crowd of small runs on a Ray of four fake machines, with stops, jobs that Ray ends, and a machine that dies."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hosts_kit import write_recipe
from machines import Machine, machines
from places_kit import COMMAND, processes_of
from ray_kit import RayMachines, ray_on
from test_crowded_pool import PoolRun
from test_hosts import losses_of_one_process

from weft.api.planning.describe import describe_recipe
from weft.config.pool import Pool, find_pool
from weft.run.launch.launcher import ForkServer
from weft.run.places.proposal import propose, state_of, stop, submit
from weft.run.places.submission import TrainOrder, newest_step

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_ray]
SUBMISSIONS = int(os.environ.get("WEFT_TEST_SUBMISSIONS", "8"))
NUM_WORKERS, STEPS, PAUSE = 4, 40, 0.2
MOST_WAITING = 3
SECONDS_EACH, DARK_SECONDS = 150, 15
FATES = {"none": 3, "stop": 1, "stop, and on": 2, "cancel": 1, "lose_power": 1}


def draw_runs(folder: Path, number: int) -> list[PoolRun]:
    draw = random.Random(number)
    runs: list[PoolRun] = []
    for index in range(number):
        least, more = draw.choice((1, 1, 2)), draw.choice((0, 1))
        nodes = f"{least}..{least + more}" if more else str(least)
        fate = draw.choices(list(FATES), list(FATES.values()))[0]
        runs.append(PoolRun(folder / f"run-{index}", nodes, least + more, fate, draw.randint(3, 2 * STEPS // 3)))
    return runs


@dataclass
class RayCrowd:
    """All runs on one Ray, and what it has said of them."""

    cluster: RayMachines
    pool: Pool
    recipe: Path
    runs: list[PoolRun]
    dead: dict[str, float] = field(default_factory=dict[str, float])
    """Addresses of machines that have died, and when they come back."""
    looks: int = 0

    def submit(self, run: PoolRun) -> None:
        plan = run.folder.with_suffix(".toml")
        plan.write_text(f"[mesh]\nreplicate = {run.ranks}\n")
        order = TrainOrder(recipe=self.recipe, plan=str(plan), processes_per_node=1, prove="never")
        run.job = submit(
            propose(order, self.pool, run.nodes, run.folder, self.recipe.parent, describe=describe_recipe)
        ).number
        run.submissions += 1

    def turn(self) -> None:
        """Look at Ray once, and do what is due."""
        self.looks += 1
        held = self.cluster.held()
        assert all(cores <= 1 for cores in held.values()), f"a core is held twice: {held}"
        for run in self.runs:
            if run.job and not run.why:
                self.look_at(run)
        for address in [address for address, back in self.dead.items() if time.monotonic() > back]:
            del self.dead[address]
            machine = self.machine(address)
            machine.boot()
            self.cluster.join(machine)
        waiting = sum(bool(run.job) and not run.why for run in self.runs)
        fresh = [run for run in self.runs if not run.job]
        if fresh and waiting < MOST_WAITING:
            self.submit(fresh[0])

    def machine(self, address: str) -> Machine:
        return next(each for each in self.cluster.workers if each.address == address)

    def look_at(self, run: PoolRun) -> None:
        state = state_of(run.folder)
        if state.phase == "ended":
            if run.fate == "stop, and on" and run.has_met_fate and run.submissions == 1:
                self.submit(run)
            else:
                run.why = state.why
                print(f"{time.strftime('%T')}  {run.row()}", flush=True)
            return
        step = newest_step(run.folder) or 0
        if run.has_met_fate or run.fate == "none" or step < run.at_step or step >= STEPS - 5:
            return
        run.has_met_fate = True
        if run.fate.startswith("stop"):
            stop(run.folder)
        elif run.fate == "cancel":
            self.cluster.post(f"/api/jobs/{run.job}/stop")
        elif not self.dead:
            address = random.Random(run.job).choice(state.nodes)
            self.machine(address).lose_power()
            self.dead[address] = time.monotonic() + DARK_SECONDS

    def wait(self, seconds: float) -> None:
        """Go on until all has ended, nothing is held, and all machines are there again."""
        deadline = time.monotonic() + seconds
        while not all(run.why for run in self.runs) or self.dead:
            assert time.monotonic() < deadline, self.table()
            self.turn()
            time.sleep(1.0)
        while (held := self.cluster.held()) or (groups := self.cluster.groups()):
            assert time.monotonic() < deadline, (held, groups)
            time.sleep(1.0)

    def table(self) -> str:
        return "\n".join(run.row() for run in self.runs)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[float]:
    return losses_of_one_process(tmp_path_factory.mktemp("one"), fork_server, steps=STEPS, pause=0.0)


@pytest.fixture
def crowd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCrowd]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = write_recipe(tmp_path, steps=STEPS, pause=PAUSE, telemetry=False)
    with machines(1 + NUM_WORKERS, tmp_path / "machines", from_here=True) as hosts, ray_on(hosts) as cluster:
        path = tmp_path / "pool.toml"
        path.write_text(
            f'place = "ray"\ncommand = {json.dumps(COMMAND)}\ngrace_seconds = 20\n'
            f'network = "{cluster.head.address}/24"\n[ray]\naddress = "{cluster.address}"\nlabels = ["rack"]\n'
        )
        yield RayCrowd(cluster, find_pool(str(path)), recipe, draw_runs(tmp_path, SUBMISSIONS))


def test_every_run_ends_as_one_process_would_or_says_why_not(crowd: RayCrowd, losses: list[float]) -> None:
    began = time.monotonic()
    crowd.wait(SECONDS_EACH * len(crowd.runs) + 120)
    print(f"{len(crowd.runs)} runs in {time.monotonic() - began:.0f} s, {crowd.looks} looks\n{crowd.table()}")
    for run in crowd.runs:
        mine = run.losses()
        assert mine == pytest.approx(losses[: len(mine)], rel=1e-5), run
        if run.why == "done":
            assert len(mine) == STEPS, run
        else:
            assert run.fate in ("stop", "cancel"), run
            assert run.has_met_fate, run
            assert "stopped" in run.why, run
    for host in crowd.cluster.workers:
        assert "weft.cli" not in processes_of(host)
