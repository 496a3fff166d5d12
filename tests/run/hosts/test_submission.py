"""What a submitted run keeps: one submission at a time, and what its agents say of its end."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from weft.errors import LaunchError
from weft.run.places.settle import settle, why_ended
from weft.run.places.slurm import expand_nodes
from weft.run.places.submission import AgentNote, Submission, ask_to_stop, newest_step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "submission").mkdir(parents=True)
    return tmp_path / "run"


def test_of_two_commands_at_the_same_time_one_submits(run: Path) -> None:
    before = Submission.newest(run)
    first = Submission.begin(run, after=before)
    with pytest.raises(LaunchError, match="another command"):
        Submission.begin(run, after=before)
    assert Submission.begin(run, after=first).number == 2
    Submission.begin(run, after=Submission.newest(run)).take_back(run)
    newest = Submission.newest(run)
    assert newest is not None
    assert newest.number == 2


def note(run: Path, *statuses: int | None, attempt: int = 0) -> None:
    for index, status in enumerate(statuses):
        AgentNote(
            index=index, host=f"node{index}", pid=1, attempt=attempt, began=0.0, status=status, text=f"says {status}"
        ).write(run)


def advance(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": step}) + "\n")


@pytest.mark.parametrize(
    ("statuses", "advances", "wanted"),
    [
        ((0, 0), False, 0),
        ((0, None), False, 0),
        ((75, 75), True, 75),
        ((75, 75), False, 75),
        ((2, 2), False, 2),
        ((2, 2), True, 75),
        ((2, 75), False, 75),
        ((1, None), True, 75),
        ((1, None), False, 75),
    ],
)
def test_a_job_is_started_again_where_that_can_help(
    run: Path, statuses: tuple[int | None, ...], advances: bool, wanted: int
) -> None:
    note(run, *statuses)
    if advances:
        advance(run, 7)
    assert settle(run) == wanted


def test_not_for_ever(run: Path) -> None:
    """Whatever ends the attempts: without a new step the third is the last; with one they are counted anew."""
    draw, step, in_vain = random.Random(5), 0, 0
    for attempt in range(60):
        note(run, *draw.choices((1, 75, None), k=2), attempt=attempt)
        if moves := draw.random() < 0.4:
            step += 1
            advance(run, step)
        in_vain = 0 if moves else in_vain + 1
        status = settle(run)
        assert status == (1 if in_vain >= 3 else 75), f"attempt {attempt}: {in_vain} in vain"


def test_nor_where_the_user_has_stopped_it(run: Path) -> None:
    Submission.begin(run, after=None)
    note(run, 75, 75)
    advance(run, 3)
    ask_to_stop(run)
    assert settle(run) == 0
    Submission.begin(run, after=Submission.newest(run))  # which is another one
    assert settle(run) == 75


def test_the_cause_is_named_with_its_host(run: Path) -> None:
    assert why_ended(run) == "no agent has started"
    note(run, 75, 2)
    assert why_ended(run) == "host node1: says 2"
    note(run, None, None, attempt=1)
    assert why_ended(run) == "agents ended without a word"


def test_a_torn_line_is_no_step(run: Path) -> None:
    assert newest_step(run) is None
    advance(run, 4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    assert newest_step(run) == 4


LISTS = {
    "node[0-2,7],other": ["node0", "node1", "node2", "node7", "other"],
    "a[08-11]": ["a08", "a09", "a10", "a11"],
    "r[1-2]n[0-1]": ["r1n0", "r1n1", "r2n0", "r2n1"],
    "": [],
}


@pytest.mark.parametrize("text", LISTS)
def test_lists_of_machines_are_read(text: str) -> None:
    assert expand_nodes(text) == LISTS[text]


@pytest.mark.needs_slurm
def test_lists_of_machines_mean_what_slurm_means(tmp_path: Path) -> None:
    configuration = tmp_path / "slurm.conf"
    configuration.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=none\n")
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    draw = random.Random(3)
    for count in range(1, 20):
        numbers = sorted(draw.sample(range(100), count))
        runs = [list(group) for _, group in itertools.groupby(numbers, key=lambda each: each - numbers.index(each))]
        ranges = ",".join(f"{part[0]:03}" if len(part) == 1 else f"{part[0]:03}-{part[-1]:03}" for part in runs)
        command = ["scontrol", "show", "hostnames", f"n[{ranges}],m{count}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert expand_nodes(command[-1]) == done.stdout.split()
