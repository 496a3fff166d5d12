"""`--on ray`: agents under a real Ray on fake machines.  One cluster serves all tests; the last ones break it."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from hosts_kit import HostJob, write_recipe
from machines import machines
from places_kit import COMMAND, PlacedRun, PlacedScript, losses_of_one_script, processes_of
from ray_kit import RayMachines, ray_on
from test_hosts import losses_of_one_process

from weft.run.launch.launcher import ForkServer

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_ray]
STEPS, PAUSE = 120, 0.05
WORKERS = 4
SECONDS = 480
"""Ray starts three processes before an agent begins, and shares two cores with all machines."""
CLUSTER = """
[[nodes]]
name = "machine"
count = 4
cores = 1
memory_bytes = 8_000_000_000
[nodes.devices]
kind = "cpu"
count = 1
memory_bytes = 8_000_000_000
memory_bandwidth_bytes_per_second = 1e10
peak_flops = { fp32 = 5e10 }
[[links]]
name = "rack"
devices = 2
latency_seconds = 1e-5
bandwidth_bytes_per_second = 1e9
[[links]]
name = "spine"
devices = 4
latency_seconds = 1e-3
bandwidth_bytes_per_second = 1e7
"""


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[float]:
    return losses_of_one_process(tmp_path_factory.mktemp("one"), fork_server, steps=STEPS, pause=0.0)


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[RayMachines]:
    with machines(1 + WORKERS, tmp_path_factory.mktemp("machines")) as hosts, ray_on(hosts) as started:
        yield started


def run_on(
    cluster: RayMachines, folder: Path, nodes: str, *, plan: str, pause: float = PAUSE, pool: str = ""
) -> PlacedRun:
    """A run that has not been submitted; commands are given on the head."""
    recipe = write_recipe(folder, steps=STEPS, pause=pause)
    (folder / "plan.toml").write_text(f"[mesh]\n{plan}\n")
    job = HostJob(recipe, folder / "run", "folder", nodes, folder / "plan.toml")
    path = folder / "pool.toml"
    lines = f'place = "ray"\ncommand = {COMMAND}\ngrace_seconds = 20\nnetwork = "{cluster.head.address}/24"\n{pool}'
    path.write_text(f'{lines}[ray]\naddress = "{cluster.address}"\nlabels = ["rack"]\n')
    return PlacedRun(job, path, cluster.head)


def request_in(said: str) -> str:
    return said.partition("which reads\n")[2].partition("\nwhy ")[0]


def wait_until_free(cluster: RayMachines) -> None:
    """Wait until no job holds anything; Ray's own report is five seconds old."""
    deadline = time.monotonic() + 30
    while (held := cluster.held()) or (groups := cluster.groups()):
        assert time.monotonic() < deadline, (held, groups)
        time.sleep(0.5)


def check_that_nothing_is_left(cluster: RayMachines) -> None:
    wait_until_free(cluster)
    for host in (cluster.head, *cluster.workers):
        assert "weft.cli" not in processes_of(host)


def test_losses_are_those_of_one_process_and_nothing_is_left(
    cluster: RayMachines, tmp_path: Path, losses: list[float]
) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    pool = f'cluster = "{tmp_path / "cluster.toml"}"\n'
    run = run_on(cluster, tmp_path, "4", plan="replicate = 2\nshard = 2", pool=pool)
    known = len(cluster.get("/api/jobs/"))
    status, said = run.submit("--dry-run", "--processes-per-node", "1")
    assert status == 0, said
    assert "4 of 4 machines are free, it starts at once" in said
    assert "blocks of 2 in one rack each" in said
    assert len(cluster.get("/api/jobs/")) == known
    assert not run.job.run.exists()
    printed = request_in(said)
    status, said = run.submit()
    assert (status, request_in(said)) == (0, printed), said
    stored = cluster.get(f"/api/jobs/{run.state()['job']}")
    asked = json.loads(printed)
    assert {key: stored[key] for key in asked} == asked
    assert run.wait_until_ended(seconds=SECONDS) == "done", run.said()
    assert run.job.losses() == pytest.approx(losses, rel=1e-5)
    assert "2 of 2 blocks of 2 lie in one rack" in run.said()
    check_that_nothing_is_left(cluster)


def test_a_stopped_run_goes_on_by_the_same_command(cluster: RayMachines, tmp_path: Path, losses: list[float]) -> None:
    run = run_on(cluster, tmp_path, "2", plan="replicate = 2", pause=0.5)  # commands take their time, too
    assert run.submit()[0] == 0
    run.job.wait_for_step(10, seconds=SECONDS)
    status, said = run.submit()
    assert (status, "running" in said) == (2, True), said
    status, said = run.weft("stop", str(run.job.run))
    assert status == 0, said
    assert run.wait_until_ended(seconds=SECONDS) == "stopped, and can go on", run.said()
    check_that_nothing_is_left(cluster)
    done = run.job.num_steps
    assert 10 <= done < STEPS
    assert run.submit()[0] == 0
    assert run.wait_until_ended(seconds=SECONDS) == "done", run.said()
    assert [each["step"] for each in run.job.events("step")] == list(range(1, STEPS + 1)), "a step was lost"
    assert run.job.losses() == pytest.approx(losses, rel=1e-5)


def test_a_session_gives_the_losses_of_one_process(
    cluster: RayMachines, tmp_path: Path, fork_server: ForkServer
) -> None:
    (tmp_path / "one").mkdir()
    losses = losses_of_one_script(tmp_path / "one", fork_server)
    run = run_on(cluster, tmp_path, "2", plan="replicate = 2")
    script = PlacedScript(run.job, run.pool, run.login)
    status, said = script.launch(nodes="2")
    assert status == 0, said
    assert script.wait_until_ended(seconds=SECONDS) == "done", script.said()
    assert script.job.losses() == pytest.approx(losses, rel=1e-5)
    check_that_nothing_is_left(cluster)


def test_what_is_wrong_is_said_in_a_paragraph_and_nothing_is_submitted(cluster: RayMachines, tmp_path: Path) -> None:
    run = run_on(cluster, tmp_path, "2", plan="replicate = 2")
    good = run.pool.read_text()
    known = len(cluster.get("/api/jobs/"))
    for pool, nodes, words in (
        (good, "5", "4 of its 5 nodes have CPU 1, and 5 are wanted: the job would wait for ever"),
        (good.replace("10.83", "10.84", 1), "2", "no node has an address in network"),
        (good.replace(":8265", ":8266"), "2", "Ray does not answer at"),
        (good.replace(":8265", ":52365"), "2", "is not Ray"),
        (good.replace("labels", "lables"), "2", "Did you mean labels"),
    ):
        run.pool.write_text(pool)
        status, said = run.submit(nodes=nodes)
        assert status == 2, said
        assert words in said
        assert "Traceback" not in said
    assert len(cluster.get("/api/jobs/")) == known
    assert not run.job.run.exists()


def test_a_job_goes_on_without_a_machine_that_loses_its_power(
    cluster: RayMachines, tmp_path: Path, losses: list[float]
) -> None:
    """It goes on with those that are left, and with another that Ray finds in place of the lost one."""
    run = run_on(cluster, tmp_path, "2..3", plan="replicate = 3", pause=0.5)
    assert run.submit()[0] == 0
    run.job.wait_for_step(20, seconds=SECONDS)
    taken = run.state()["machines"]
    lost = next(each for each in cluster.workers if each.address == taken[2])
    before = run.job.num_steps
    lost.lose_power()
    cluster.workers.remove(lost)
    assert run.wait_until_ended(seconds=SECONDS) == "done", run.said()
    assert run.job.losses() == pytest.approx(losses, rel=1e-5)
    numbers = [each["world_size"] for each in run.job.events("generation")]
    # Where all three met before ranks began there is no generation of three in front.
    assert 2 in numbers, numbers
    assert 3 in numbers[numbers.index(2) :], f"no machine took the place of the lost one: {numbers}\n{run.said()}"
    steps = [each["step"] for each in run.job.events("step")]
    assert len(steps) - STEPS <= 25, f"{len(steps) - STEPS} steps were repeated, of {before}"
    check_that_nothing_is_left(cluster)


def test_a_head_that_is_gone_is_said(cluster: RayMachines, tmp_path: Path) -> None:
    run = run_on(cluster, tmp_path, "2", plan="replicate = 2")
    words = ["sh", "-c", "pkill -f '[d]ashboard/dashboard.py'"]
    assert cluster.head.start(words).wait(30) == 0
    deadline = time.monotonic() + 30
    while "does not answer" not in (said := run.submit("--dry-run")[1]):
        assert time.monotonic() < deadline, said
    assert run.submit()[0] == 2
    assert not run.job.run.exists()
