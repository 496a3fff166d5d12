"""Profiles of some steps: what ranks write when they are asked, and what is read from it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from living_run import living_run
from recorded_runs import MadeUpRun

from weft.config.recipe import ProfileRecipe, parse_recipe
from weft.errors import LaunchError, RecipeError
from weft.events import RunFolder
from weft.events.profile_request import ProfileRequest, facts_path, trace_path, window_folder
from weft.run.engine.profiler import StepProfiler
from weft.watch.profile_run import OwnProfile, ranks_to_profile
from weft.watch.profiles import NO_OPERATOR, compare, operators_of, profile_lines, read_window
from weft.watch.run_record import RunRecord
from weft.watch.views import page_of

RECIPE = """
[model]
reference = "mlp"
num_layers = 2
input_size = 64
hidden_size = 64
num_classes = 10
[data]
train = [{ source = "synthetic" }]
[batch]
global_batch_size = 8
[run]
steps = 1000000
[run.profile]
ranks = "all"
steps = 2
"""
WEFT = str(Path(sys.executable).with_name("weft"))


def event(name: str, begin: float, took: float, *, tid: int = 7, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": begin, "dur": took}


def test_an_operator_has_its_own_time_alone() -> None:
    events = [
        event("aten::linear", 100.0, 50.0),
        event("aten::addmm", 110.0, 30.0),
        event("aten::copy_", 112.0, 10.0),
        event("aten::relu", 150.0, 20.0),
        event("aten::copy_", 100.0, 60.0, tid=8),
        event("sgemm", 120.0, 40.0, cat="kernel"),
        {"ph": "i", "name": "mark", "ts": 1.0},
    ]
    found = operators_of({"traceEvents": events}, num_steps=2, seconds=100e-6)
    micros = {name: (round(1e6 * each.seconds, 3), each.calls) for name, each in found.items()}
    assert micros == {
        "aten::copy_": (35.0, 1.0),
        "sgemm (device)": (20.0, 0.5),
        "aten::addmm": (10.0, 0.5),
        "aten::linear": (10.0, 0.5),
        "aten::relu": (10.0, 0.5),
        NO_OPERATOR: (15.0, 1.0),
    }
    assert list(found)[0] == "aten::copy_"


def test_ranks_that_are_asked_for(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=4, began=10.0, slow={(2, "optimizer"): 0.03})
    run.add(60)
    record = RunRecord(run.folder)
    chosen = ranks_to_profile(record, "suspects")
    assert chosen.ranks[0] == 2
    assert len(chosen.ranks) == 2
    assert chosen.why == "suspected in optimizer, and a healthy one"
    assert ranks_to_profile(record, "3,0,3").ranks == (3, 0)
    assert ranks_to_profile(record, "all").ranks == (0, 1, 2, 3)
    wrong = {"0,4": "no rank 4", "-1": "no rank -1", "first": "names no ranks", "": "names no ranks"}
    for asked, said in wrong.items():
        with pytest.raises(LaunchError, match=said):
            ranks_to_profile(record, asked)
    record.close()
    run.end()


def judged(folder: Path, **about: Any) -> ProfileRequest | None:
    """Let a run of four ranks be judged twice that profiles its suspects; return what was asked for."""
    run = MadeUpRun(folder=folder, data=4, began=10.0, **about)
    run.add(60)
    record, own = RunRecord(folder), OwnProfile(RunFolder(folder), ProfileRecipe(ranks="suspects", steps=5))
    for _ in range(2):
        own(record.verdicts, record.facts, record.window)
    record.close()
    run.end()
    return ProfileRequest.newest(RunFolder(folder))


def test_a_run_profiles_its_suspects_once(tmp_path: Path) -> None:
    asked = judged(tmp_path / "slow", slow={(2, "optimizer"): 0.03})
    assert asked is not None
    assert (asked.ranks[0], len(asked.ranks), asked.num_steps, asked.number) == (2, 2, 5, 1)
    assert asked.after_step > 60
    assert judged(tmp_path / "even") is None


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ('ranks = "all"', 'ranks = "some"', "ranks"),
        ("steps = 2", "steps = 0", "steps"),
        ("steps = 2", "steps = 101", "steps"),
        ("[run]", "[run]\ntelemetry = false", "Leave one of them out"),
    ],
)
def test_what_a_recipe_cannot_profile(was: str, becomes: str, said: str) -> None:
    assert parse_recipe(RECIPE).run.profile.steps == 2
    with pytest.raises(RecipeError, match=said):
        parse_recipe(RECIPE.replace(was, becomes))


def test_a_run_without_a_suspect_profiles_its_first_rank(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=4, began=10.0)
    run.add(60)
    record = RunRecord(run.folder)
    assert ranks_to_profile(record, "suspects").why == "no rank is suspected, so the first"
    record.close()
    run.end()


def steps(profiler: StepProfiler, first: int, last: int) -> list[int]:
    """Do steps; return those after which the profiler did something."""
    took: list[int] = []
    for step in range(first, last + 1):
        torch.ones(8, 8) @ torch.ones(8, 8)
        if profiler.after_step(step):
            took.append(step)
    return took


def test_a_rank_profiles_what_it_is_asked_for(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    ProfileRequest(ranks=(1,), after_step=2, num_steps=1).ask(run)  # of the run that was here before
    profiler = StepProfiler(run, 1)
    assert steps(profiler, 1, 5) == []
    asked = ProfileRequest(ranks=(0, 1), after_step=7, num_steps=3).ask(run)
    assert asked.number == 2
    assert steps(profiler, 6, 12) == [7, 10]
    (found,) = read_window(window_folder(run, 2), (0, 1))
    assert (found.rank, found.steps) == (1, (8, 10))
    assert found.operators["aten::mm"].calls == 1.0
    assert found.operators["aten::mm"].seconds > 0
    printed = profile_lines([found])
    assert printed[0].startswith("steps     8 to 10 of rank 1: ")
    assert any(re.fullmatch(r"aten::mm +\d+\.\d{3} +1", line) for line in printed)
    assert f"trace     {trace_path(window_folder(run, 2), 1)}" in printed
    assert compare([found])[0][1] == [next(iter(found.operators.values()))]
    ProfileRequest(ranks=(0,), after_step=0, num_steps=3).ask(run)
    assert steps(profiler, 13, 20) == []


def test_a_page_shows_the_newest_profile(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=2, began=10.0)
    run.add(60)
    record = RunRecord(run.folder)
    assert record.profiles == []
    profilers = [StepProfiler(RunFolder(run.folder), rank) for rank in range(2)]
    ProfileRequest(ranks=(1, 0), after_step=0, num_steps=2).ask(RunFolder(run.folder))
    for profiler in profilers:
        steps(profiler, 61, 64)
    (block,) = (block for block in page_of(record, "ranks")["blocks"] if block["title"] == "Operators of rank 1")
    assert "Own time per step in steps 62 to 63" in block["says"]
    assert "The line in a bar is rank 0." in block["says"]
    names = [column["name"] for column in block["table"]["columns"]]
    assert names[:3] == ["operator", f"rank 1 ({block['unit']})", f"rank 0 ({block['unit']})"]
    record.close()
    run.end()


def test_the_end_of_a_run_ends_the_window(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    profiler = StepProfiler(run, 0)
    ProfileRequest(ranks=(0,), after_step=0, num_steps=50).ask(run)
    assert steps(profiler, 1, 4) == [1]
    profiler.close(4)
    (found,) = read_window(window_folder(run, 1), (0,))
    assert found.steps == (2, 4)


def test_a_window_behind_the_last_step_is_none(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    profiler = StepProfiler(run, 0)
    ProfileRequest(ranks=(0,), after_step=5, num_steps=2).ask(run)
    assert steps(profiler, 1, 5) == [5]
    profiler.close(5)
    assert read_window(window_folder(run, 1), (0,)) == []
    assert not torch.autograd._profiler_enabled()


OWN_PROFILER = """
import sys
from pathlib import Path
import torch
from weft.events import RunFolder
from weft.events.profile_request import ProfileRequest
from weft.run.engine.profiler import StepProfiler

run, own_at, weft_at = RunFolder(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
is_scheduled = sys.argv[4] == "True"
profiler, activities = StepProfiler(run, 0), [torch.profiler.ProfilerActivity.CPU]
schedule = torch.profiler.schedule(wait=own_at, warmup=2, active=3, repeat=1) if is_scheduled else None
own = torch.profiler.profile(activities=activities, schedule=schedule)
if is_scheduled:
    own.start()
for step in range(1, 16):
    if step == own_at and not is_scheduled:
        own.start()
    if step == weft_at:
        ProfileRequest(ranks=(0,), after_step=0, num_steps=4).ask(run)
    for _ in range(50):
        torch.ones(32, 32) @ torch.ones(32, 32)
    profiler.after_step(step)
    if is_scheduled:
        own.step()
    elif step == own_at + 2:
        own.stop()
own.export_chrome_trace(f"{sys.argv[1]}/own.json")
profiler.close(15)
print(sum(event.count for event in own.key_averages() if event.key == "aten::mm"))
"""


@pytest.mark.parametrize(
    ("own_at", "weft_at", "is_scheduled", "both"),
    [(3, 4, False, False), (5, 3, False, False), (8, 1, False, True), (3, 2, True, False), (3, 4, True, False),
     (3, 5, True, False), (6, 1, True, True), (2, 9, True, True)],
)  # fmt: skip
def test_a_loops_own_profiler_comes_first(
    tmp_path: Path, own_at: int, weft_at: int, is_scheduled: bool, both: bool
) -> None:
    words = [str(tmp_path), str(own_at), str(weft_at), str(is_scheduled)]
    done = subprocess.run([sys.executable, "-c", OWN_PROFILER, *words], text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["150"]
    assert bool(read_window(window_folder(RunFolder(tmp_path), 1), (0,))) is both


def test_a_trace_that_cannot_be_written_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunFolder(tmp_path)
    profiler = StepProfiler(run, 0)
    ProfileRequest(ranks=(0,), after_step=0, num_steps=2).ask(run)
    window_folder(run, 1).rmdir()
    window_folder(run, 1).touch()
    assert steps(profiler, 1, 5) == [1, 3]
    assert "the trace of steps 2 to 3 was not written" in caplog.text
    ProfileRequest(ranks=(0,), after_step=0, num_steps=2).ask(run)
    assert steps(profiler, 6, 9) == [6, 8]


def test_a_loop_that_profiles_itself_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunFolder(tmp_path)
    profiler = StepProfiler(run, 0)
    ProfileRequest(ranks=(0,), after_step=0, num_steps=2).ask(run)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        assert steps(profiler, 1, 4) == [1]
    assert "the loop has a profiler of its own on" in caplog.text
    assert sum(event.count for event in own.key_averages() if event.key == "aten::mm") == 4
    ProfileRequest(ranks=(0,), after_step=0, num_steps=2).ask(run)
    assert steps(profiler, 5, 8) == [5, 7]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"ranks": [0], "after_step": 1, "num_steps": 1000, "number": 1}', '{"ranks": 3}']
)
def test_what_is_no_request_is_left_alone(tmp_path: Path, text: str) -> None:
    run = RunFolder(tmp_path)
    run.profiles.mkdir()
    (run.profiles / "request.json").write_text(text)
    assert ProfileRequest.newest(run) is None
    assert steps(StepProfiler(run, 0), 1, 3) == []


def test_a_slow_rank_of_a_living_run_is_profiled_beside_a_healthy_one(tmp_path: Path) -> None:
    with living_run(tmp_path, 2, "optimizer", 0.2) as run:

        def weft(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([WEFT, *words], cwd=tmp_path, text=True, capture_output=True, timeout=120)

        run.wait_for(lambda: RunRecord(run.folder).verdicts[0].ranks == (2,) or None, 60)
        done = weft("profile", str(run.folder))
        assert done.returncode == 0, done.stderr
        assert "3 steps of ranks 2, " in done.stdout
        assert "suspected in optimizer, and a healthy one" in done.stdout
        slow, healthy = RunRecord(run.folder).profiles
        assert slow.rank == 2
        # The fault is a sleep, which is no operator: that row is the largest difference, and stands first.
        assert slow.operators[NO_OPERATOR].seconds - healthy.operators[NO_OPERATOR].seconds > 0.05
        assert compare([slow, healthy])[0][0] == NO_OPERATOR
        assert {"aten::addmm", "aten::mm"} & slow.operators.keys()
        assert any(name.startswith("weft:") for name in healthy.operators)
        again = weft("profile", str(run.folder), "--ranks", "0", "--steps", "1")
        assert again.returncode == 0, again.stderr
        assert trace_path(window_folder(RunFolder(run.folder), 2), 0).is_file()
        before = run.reader.newest_step()[1]
        run.wait_for(lambda: run.reader.newest_step()[1] > before + 3 or None, 20)
    ended = subprocess.run([WEFT, "profile", str(run.folder)], text=True, capture_output=True)
    assert ended.returncode == 2
    assert "only steps to come can be profiled" in ended.stderr


def test_a_recipe_asks_for_a_profile(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    words = [WEFT, "train", str(recipe), "--processes", "2", "--run-folder", "run", "--prove", "never"]
    run = subprocess.Popen(words, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    window = window_folder(RunFolder(tmp_path / "run"), 1)
    deadline = time.monotonic() + 120
    while not all(facts_path(window, rank).is_file() for rank in (0, 1)) and time.monotonic() < deadline:
        assert run.poll() is None
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    said = run.communicate()[0]
    found = read_window(window, (0, 1))
    assert [each.rank for each in found] == [0, 1], said
    assert {each.steps[1] - each.steps[0] for each in found} == {1}
