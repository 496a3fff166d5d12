"""Blocks under a real Slurm with three switches: what is stored, what is granted, and the order of ranks."""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import pytest
from machines import Machine, machines
from slurm import slurm_on
from test_gangs import facts_of
from test_hosts import losses_of_one_process
from test_slurm_place import run_under_slurm

from weft.config.cluster import Cluster, LinkTier, parse_cluster_spec
from weft.config.pool import Pool, SlurmSettings
from weft.model.description import description_of_sizes
from weft.model.profile.known import known_model
from weft.planning.price import price_blocks
from weft.run.hosts.roster import in_order
from weft.run.launch.launcher import ForkServer
from weft.run.places import place_of
from weft.run.places.contract import Gang, GangBlock, Job, PlaceSeat
from weft.run.places.placement import num_whole, placement_lines
from weft.run.places.proposal import block_of
from weft.techniques.cost_terms import Layout

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_slurm]
DRAWS, STEPS = 20, 20
NUM_LEAVES, LEAF_NODES, PER_NODE = 3, 3, 8
NUM_NODES = NUM_LEAVES * LEAF_NODES
WAIT_SECONDS = 4
TELLER = Path(__file__).with_name("seat_teller.py")


@dataclass
class Engine:
    """Slurm on fake machines under three leaf switches."""

    login: Machine
    environment: dict[str, str]
    leaf_of: dict[str, str]

    def ask(self, *words: str) -> str:
        said, _ = self.login.start(list(words), environment=self.environment).communicate(timeout=30)
        return said.strip()

    def occupy(self, nodes: list[str]) -> str:
        """Have another job hold some nodes; return its number."""
        words = ["--exclusive", "--output=/dev/null", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"]
        number = self.ask("sbatch", "--parsable", *words, "--wrap=sleep 600")
        self.wait_for_state(number, "RUNNING")
        return number

    def wait_for_state(self, number: str, state: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while self.state(number) != state:
            assert time.monotonic() < deadline, self.ask("scontrol", "show", "job", number)
            time.sleep(0.1)

    def state(self, number: str) -> str:
        return self.field(number, "JobState")

    def field(self, number: str, name: str) -> str:
        """A field of what Slurm keeps of a job; empty: it has none."""
        match = re.search(rf"\b{name}=(\S*)", self.ask("scontrol", "show", "job", number))
        return match[1] if match is not None else ""

    def time(self, number: str, name: str) -> float:
        return datetime.fromisoformat(self.field(number, name)).timestamp()

    def submit(self, gang: Gang, folder: Path) -> str:
        """Hand a gang's request over, whose agents only note their seats in the folder; return its number."""
        command = ("env", f"PYTHONPATH={os.pathsep.join(sys.path)}", sys.executable, str(TELLER))
        settings = SlurmSettings(gpus=False, switch_wait_seconds=WAIT_SECONDS)
        pool = Pool(place="slurm", name="lab", command=command, slurm=settings)
        (folder / "submission").mkdir()
        request = place_of("slurm").request(gang, Job(name="weft-run", run=folder), pool)
        (folder / "request").write_text(request.text)
        return self.ask(*request.command, str(folder / "request"))

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 20
        while self.ask("sinfo", "-h", "-o", "%t %D") != f"idle {NUM_NODES}":
            assert time.monotonic() < deadline, self.ask("squeue")
            time.sleep(0.1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Names are dealt out so that their order goes from leaf to leaf."""
    folder, draw = tmp_path_factory.mktemp("switches"), random.Random(7)
    with machines(NUM_NODES + 1, folder / "machines") as (login, *workers):
        names = [each.name for each in workers]
        leaf_of: dict[str, str] = {}
        for start in range(0, NUM_NODES, NUM_LEAVES):
            leaves = draw.sample(range(NUM_LEAVES), NUM_LEAVES)
            leaf_of |= {name: f"leaf{leaf}" for name, leaf in zip(names[start:], leaves, strict=False)}
        under = {leaf: [name for name in names if leaf_of[name] == leaf] for leaf in sorted(set(leaf_of.values()))}
        with slurm_on(login, workers, folder / "slurm", leaves=under) as environment:
            yield Engine(login, {"SLURM_CONF": environment["SLURM_CONF"]}, leaf_of)


@dataclass
class Case:
    """A drawn gang, and what others hold of the cluster."""

    gang: Gang
    block: GangBlock
    occupied: list[str]
    switches: int
    """Fewest leaves that can hold the gang."""
    has_room: bool
    """Whether so many leaves have enough nodes that are free."""


def draw_case(seed: int, leaf_of: dict[str, str]) -> Case:
    """Every other one finds no room, where its size permits that."""
    draw = random.Random(seed)
    gang = draw_gang(draw)
    switches = math.ceil(gang.least / LEAF_NODES)
    tries = 100
    while True:
        occupied = draw.sample(list(leaf_of), draw.randint(0, NUM_NODES - gang.least))
        free = Counter(leaf for name, leaf in leaf_of.items() if name not in occupied)
        has_room = sum(count for _, count in free.most_common(switches)) >= gang.least
        tries -= 1
        if has_room == bool(seed % 2) or not tries:
            return Case(gang, gang.blocks[0], occupied, switches, has_room)


def draw_gang(draw: random.Random) -> Gang:
    """A gang of two to nine nodes whose plan has blocks."""
    shard = draw.choice((1, 2, 3))
    replicate = draw.randint(2 if shard == 1 else 1, NUM_NODES // shard)
    layout = Layout(tensor=PER_NODE, shard=shard, replicate=replicate, zero=draw.choice((2, 3)), microbatch_size=1)
    profile = description_of_sizes(known_model("llama-3.1-8b").sizes).profile
    cluster = cluster_of_leaves()
    # What a split block costs is judged elsewhere: here each is a wish.
    priced = (block_of(each, cluster) for each in price_blocks(profile, cluster, layout))
    blocks = tuple(replace(block, must=False) for block in priced)
    if not blocks:  # no divisor of a prime number of replicas fits a leaf
        return draw_gang(draw)
    nodes = shard * replicate
    return Gang(least=nodes, most=nodes, num_devices=PER_NODE, accelerator="h100", blocks=blocks)


def cluster_of_leaves() -> Cluster:
    cluster = parse_cluster_spec(f"{NUM_NODES}x{PER_NODE}xh100")
    leaf = LinkTier(name="leaf", devices=LEAF_NODES * PER_NODE, latency_seconds=5e-6, bandwidth_bytes_per_second=5e10)
    spine = replace(leaf, name="spine", devices=NUM_NODES * PER_NODE, topology="tree", oversubscription=5.0)
    return replace(cluster, links=(cluster.links[0], leaf, spine))


@pytest.mark.parametrize("seed", range(DRAWS))
def test_what_is_granted_is_what_was_asked_and_ranks_follow_the_switches(
    engine: Engine, tmp_path: Path, seed: int
) -> None:
    case = draw_case(seed, engine.leaf_of)
    other = engine.occupy(case.occupied) if case.occupied else None
    number = engine.submit(case.gang, tmp_path)
    assert engine.field(number, "Switches") == f"{case.switches}@00:00:{WAIT_SECONDS:02}", "stored otherwise"
    engine.wait_for_state(number, "COMPLETED", seconds=60)
    seats = [PlaceSeat(**json.loads(path.read_text())) for path in tmp_path.glob("seat-*.json")]
    assert len(seats) == case.gang.least
    assert all(tuple(seat.topology) == ("spine", engine.leaf_of[seat.node]) for seat in seats)
    granted = Counter(engine.leaf_of[seat.node] for seat in seats)
    assert (len(granted) <= case.switches) == case.has_room, granted
    waited = engine.time(number, "StartTime") - engine.time(number, "SubmitTime")
    assert case.has_room or waited >= WAIT_SECONDS - 1, "the wish has not run out"

    random.Random(seed).shuffle(seats)  # as agents happen to come
    joined = {f"agent {seat.index}": facts_of(tuple(seat.topology), seat.index) for seat in seats}
    ordered = in_order(joined, [(block.num_nodes, block.level) for block in case.gang.blocks])
    paths = [facts.topology for facts in ordered.values()]
    assert next(iter(ordered)) == next(iter(joined)), "the leader has rank 0"
    size = case.block.num_nodes
    whole, blocks = sum(nodes // size for nodes in granted.values()), case.gang.least // size
    assert num_whole(case.block, paths) == whole
    (line,) = placement_lines(case.gang.blocks, paths)
    assert f"{whole} of {blocks} blocks of {size} lie in one leaf" in line
    assert ("per step (+" in line) == (whole < blocks)

    if other is not None:
        engine.ask("scancel", other)
    engine.wait_until_idle()


LEAVES = {"leaf0": ["node1", "node4"], "leaf1": ["node2", "node5"], "leaf2": ["node3", "node6"]}
CLUSTER = """
[[nodes]]
count = 6
cores = 2
memory_bytes = 4_000_000_000
[nodes.devices]
kind = "cpu"
count = 1
memory_bytes = 4_000_000_000
peak_flops = { fp32 = 1e11 }
memory_bandwidth_bytes_per_second = 1e10
[[links]]
name = "leaf"
devices = 2
latency_seconds = 2e-5
bandwidth_bytes_per_second = 1e9
[[links]]
name = "spine"
devices = 6
latency_seconds = 5e-5
bandwidth_bytes_per_second = 1e9
topology = "tree"
oversubscription = 2.0
"""


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[float]:
    return losses_of_one_process(tmp_path_factory.mktemp("one"), fork_server, steps=STEPS, pause=0.0)


@pytest.mark.parametrize("occupied", ["", "node2,node3"])
def test_a_run_says_how_many_blocks_are_whole(tmp_path: Path, losses: list[float], occupied: str) -> None:
    pool = f'cluster = "cluster.toml"\n[slurm]\nswitch_wait_seconds = {WAIT_SECONDS}\n'
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    with run_under_slurm(tmp_path, 6, "4", leaves=LEAVES, pool=pool, steps=STEPS) as (run, _):
        run.job.plan.write_text("[mesh]\nreplicate = 2\nshard = 2\n")
        if occupied:
            run.ask("sbatch", "--exclusive", "--output=/dev/null", f"--nodelist={occupied}", "--wrap=sleep 600")
        own, longer = run.pool.read_text(), run.pool.read_text().replace(f"= {WAIT_SECONDS}\n", "= 600\n")
        run.pool.write_text(longer)
        _, said = run.submit("--dry-run", "--processes-per-node", "1")
        assert "after 300 s (the site's max_switch_wait) it takes machines under any switches" in said
        run.pool.write_text(own)
        status, said = run.submit()
        assert status == 0, said
        assert f"--switches=2@0-00:00:{WAIT_SECONDS:02}" in said
        assert "blocks of 2 in one leaf each, for shard" in said
        assert run.wait_until_ended() == "done", run.said()
        whole = 1 if occupied else 2
        assert f"placed    {whole} of 2 blocks of 2 lie in one leaf" in run.said()
        line = next(line for line in run.said().splitlines() if line.startswith("hosts     4 hosts: "))
        hosts = line.removeprefix("hosts     4 hosts: ").split(", ")
        leaves = [next(leaf for leaf, names in LEAVES.items() if host in names) for host in hosts]
        assert sum(leaves[first] == leaves[first + 1] for first in (0, 2)) == whole, line
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)
