"""`weft train` from the first line to the export; stopped, killed and resumed; and the other ways in."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_kit import RECIPE, WEFT, Act, Done, watch, write_corpus
from metrics_lines import STEP_KEYS

from weft.watch.samples import newest_samples

TRAIN = (WEFT, "train", "recipe.toml", "--processes", "2")
LONG = ("--set", "recipe.run.steps=3000", "--set", "recipe.run.evaluate_every=3000")
THREE_D = "[mesh]\ntensor = 2\npipeline = 2\n[microbatch]\nsize = 2\nper_step = 4\n"
STEP_LINE = r"step +\d+  loss \d+\.\d{3}  tok/s +[\d,.]+ +\d+ % of peak  \d+\.\d\d GiB/rank  ETA +(\d+h)?(\d+m)?(\d+s)?"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "plan.toml").write_text(THREE_D)
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def trained(home: Path) -> Done:
    """The whole run, on two data ranks, in runs/whole."""
    return watch((*TRAIN, "--run-folder", "runs/whole"), home)


def metrics(run: Path, kind: str = "step") -> dict[int, dict[str, Any]]:
    """Lines of metrics.jsonl by step; of two lines of one step the later counts."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}


def losses(run: Path) -> dict[int, float]:
    return {step: line["loss"] for step, line in metrics(run).items()}


def test_a_run_tells_what_it_does(trained: Done) -> None:
    assert trained.status == 0, trained.text
    steps = [line for line in trained.lines if re.match(r"step +\d+  loss", line)]
    assert len(steps) == 60
    assert all(re.fullmatch(STEP_LINE, line) for line in steps), steps[0]
    for start in ("weft 0.", "recipe    decoder, 0.1 M parameters, batches of 256 tokens", "data      corpus: "):
        assert any(line.startswith(start) for line in trained.lines), start
    for start in (
        "plan      data 2 = 2 processes",
        "run       runs/whole/",
        "done      loss 5.",
        "next      weft generate",
    ):
        assert any(line.startswith(start) for line in trained.lines), start
    assert sum("validation loss" in line for line in trained.lines) == 2  # at step 40, and at the end
    (sent,) = (line for line in trained.lines if line.startswith("sent "))
    assert sent.endswith("per step: exactly what the plan says, in the 60 steps that were reported")


def test_the_folder_holds_everything(home: Path, trained: Done) -> None:
    assert trained.status == 0, trained.text
    run = home / "runs" / "whole"
    names = {path.name for path in run.iterdir()}
    assert names == {
        *("recipe.toml", "plan.toml", "tokenizer.json", "metrics.jsonl", "checkpoints", "export"),
        *("rank-0.log", "rank-1.log", "owner.json", "telemetry.sqlite"),
    }
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"latest", "step-000040", "step-000060"}
    assert list(metrics(run)) == list(range(1, 61))
    assert set(metrics(run)[1]) == STEP_KEYS
    first = metrics(run)[1]
    assert first["count"] == 256
    units = ("_per_second", "_seconds", "_bytes", "_norm", "_rate", "_share", "_scale")
    plain = {"kind", "step", "loss", "count", "skipped", "communication"}
    assert all(name in plain or name.endswith(units) for name in first), first.keys()
    assert list(metrics(run, "evaluation")) == [40, 60]
    second, third = (metrics(run)[step]["communication"]["data"] for step in (2, 3))
    assert second["bytes"] == third["bytes"] > 4 * 100_000, "gradients and weights of 0.1 M parameters travel"
    assert 0 < second["exposed_seconds"] <= metrics(run)[2]["step_seconds"]
    assert set(second) == {"count", "bytes", "total_seconds", "exposed_seconds"}
    assert losses(run)[60] < 0.8 * losses(run)[1]
    assert "saved" in (run / "rank-1.log").read_text()
    assert run.stat().st_mode & 0o077 == 0, "only its owner may read a run"


def test_the_export_loads_in_transformers_with_equal_logits(home: Path, trained: Done) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from weft.api import load_module
    from weft.config.recipe import load_recipe
    from weft.model.build import build_model

    assert trained.status == 0, trained.text
    run = home / "runs" / "whole"
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    tokens = tokenizer("text 3 says 7 and", return_tensors="pt").input_ids
    theirs = AutoModelForCausalLM.from_pretrained(run / "export").eval()
    blueprint = build_model(load_recipe(run / "recipe.toml"))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, load_module(run, blueprint)(tokens), atol=1e-4, rtol=1e-4)


def test_generate(home: Path, trained: Done) -> None:
    assert trained.status == 0, trained.text
    command = (WEFT, "generate", "runs/whole", "--prompt", "text 3", "--tokens", "20", "--temperature", "0")
    done = watch(command, home)
    assert done.status == 0
    assert done.text.startswith("text 3")
    assert len(done.text) > 10
    (sample,) = newest_samples(home / "runs" / "whole" / "samples.jsonl", most=8)
    assert sample["text"].strip() == done.text.strip()
    assert (sample["prompt"], sample["temperature"], sample["seed"]) == ("text 3", 0.0, 0)
    assert sample["step"] > 0


def test_three_dimensions_give_the_same_curve(home: Path, trained: Done) -> None:
    assert trained.status == 0, trained.text
    command = (WEFT, "train", "recipe.toml", "--plan", "plan.toml", "--set", "recipe.run.steps=10")
    done = watch((*command, "--run-folder", "runs/3d"), home)
    assert done.status == 0, done.text
    assert "tensor 2 × pipeline 2 = 4 processes" in done.text
    whole, split = losses(home / "runs" / "whole"), losses(home / "runs" / "3d")
    assert [split[step] for step in range(1, 11)] == pytest.approx([whole[step] for step in range(1, 11)], rel=2e-5)
    assert {path.name for path in (home / "runs" / "3d").glob("rank-*.log")} == {
        f"rank-{rank}.log" for rank in range(4)
    }


def test_ctrl_c_saves_and_the_printed_command_goes_on_bit_for_bit(home: Path, trained: Done) -> None:
    assert trained.status == 0, trained.text
    stopped = watch(
        (*TRAIN, "--run-folder", "runs/cut"), home, until="step    3 ", act=lambda act: act.send(signal.SIGINT)
    )
    assert stopped.status == 130, stopped.text
    assert stopped.text.count("SIGINT: stopping after this step and saving; once more stops at once") == 1
    match = re.search(r"^stopped   at step (\d+), saved\. Go on with: weft (.+)$", stopped.text, re.MULTILINE)
    assert match is not None, stopped.text
    assert 3 <= int(match[1]) < 60
    assert not (home / "runs" / "cut" / "export").exists()
    resumed = watch((WEFT, *shlex.split(match[2])), home)
    assert resumed.status == 0, resumed.text
    whole, cut = losses(home / "runs" / "whole"), losses(home / "runs" / "cut")
    assert cut == whole, "the same plan, stopped and resumed, gives the curve bit for bit"
    assert (home / "runs" / "cut" / "export" / "model.safetensors").is_file()
    fewer = watch((WEFT, *shlex.split(match[2]), "--set", "recipe.run.steps=50"), home)
    assert fewer.status == 2, fewer.text
    assert re.search(r"has done 60 steps, and run\.steps = 50: .* Set run\.steps above 60", fewer.text), fewer.text
    assert "Traceback" not in fewer.text


def test_sigterm_saves_too(home: Path) -> None:
    done = watch((*TRAIN, *LONG), home, until="step    3 ", act=lambda act: act.send(signal.SIGTERM))
    assert done.status == os.EX_TEMPFAIL, done.text  # a job engine starts it again later
    assert "SIGTERM: stopping after this step" in done.text
    assert "Go on with: weft train" in done.text


SLOW = """
import time
from torch import Tensor, nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 8), nn.Linear(8, 300)
    def forward(self, tokens: Tensor) -> Tensor:
        time.sleep(1.0)
        return self.head(self.embedding(tokens))
"""
SLOW_RECIPE = """
[model]
factory = "slow:Slow"
sequence_length = 8
[data]
train = [{ source = "synthetic" }]
validation_fraction = 0.0
[batch]
global_batch_size = 2
[run]
steps = 100
"""


def test_second_ctrl_c_stops_at_once(home: Path) -> None:
    (home / "slow.py").write_text(SLOW)
    (home / "slow.toml").write_text(SLOW_RECIPE)

    def twice(act: Act) -> None:
        act.send(signal.SIGINT)
        time.sleep(0.2)
        act.send(signal.SIGINT)

    done = watch((WEFT, "train", "slow.toml", "--processes", "2"), home, until="step    1 ", act=twice)
    assert done.status == 130, done.text
    assert done.lines[-1] == "stopped by Ctrl-C; what was saved before is kept."
    assert "stopped   at step" not in done.text, "it must not wait for the step, which takes seconds"


def test_a_run_is_not_resumed_while_it_runs_and_at_once_after_a_kill(home: Path) -> None:
    command = (*TRAIN, *LONG, "--set", "recipe.run.save_every=2", "--run-folder", "runs/held")
    resume = (*TRAIN, *LONG, "--set", "recipe.run.save_every=2", "--resume", "runs/held")
    seconds: list[Done] = []

    def resume_then_kill(act: Act) -> None:
        seconds.append(watch(resume, home))
        act.send(signal.SIGKILL)

    first = watch(command, home, until="step    6 ", act=resume_then_kill)
    assert first.status == -signal.SIGKILL, first.text
    (second,) = seconds
    assert second.status == 2, second.text
    assert re.search(
        r"runs/held is in use by process \d+ on host \S+ \(user .*, since .*: weft train recipe\.toml .*\)\."
        r" Wait until that has ended, stop it \(kill \d+\), or give another folder\.",
        " ".join(second.lines),
    ), second.text
    lines = map(json.loads, (home / "runs" / "held" / "metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "the second wrote nothing into the metrics of the first"
    third = watch(resume, home, until="step ", act=lambda act: act.send(signal.SIGINT))
    assert third.status == 130, third.text
    assert re.search(
        r"runs/held was left by process \d+ .*, which has ended: this run takes the folder over", third.text
    )


def test_killed_rank_is_named_and_nothing_stays(home: Path) -> None:
    settings = ("--set", "recipe.run.save_every=2", "--set", "recipe.run.on_failure.killed=stop")
    command = (*TRAIN, *LONG, *settings, "--run-folder", "runs/killed")
    done = watch(command, home, until="step    6 ", act=lambda act: act.kill_a_rank())
    assert done.status == 1, done.text
    assert re.search(r"rank \d of 2 on host \S+ stopped: killed by SIGKILL", done.text), done.text
    go_on = "Go on with: weft train runs/killed/recipe.toml --plan runs/killed/plan.toml --resume runs/killed"
    assert done.text.count(go_on) == 1, done.text
    assert "Traceback" not in done.text
    assert done.seconds_after < 30, "the other rank must not wait for its timeout"


def test_stopped_rank_is_named_at_the_deadline(home: Path) -> None:
    deadline = ("--set", "plan.compute.collective_timeout_seconds=4", "--set", "recipe.run.on_failure.hang=stop")
    command = (*TRAIN, *LONG, *deadline)
    done = watch(command, home, until="step    3 ", act=lambda act: act.send_to_a_rank(signal.SIGSTOP))
    assert done.status == 1, done.text
    early = r"rank 1 \(pid (\d+)\) on host \S+ was stopped by a signal \(SIGSTOP\), and the others"
    assert re.search(rf"{early} wait for it\..* kill -CONT", done.text), done.text
    assert re.search(rf"{early} waited for it in vain, so the run has ended\. Continue", done.text), done.text
    assert "destroy_process_group" not in done.text
    assert "Traceback" not in done.text
    assert done.seconds_after < 30, "and not after ten minutes"


# ── other ways in ─────────────────────────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import sys
import weft

found = weft.train("recipe.toml", processes=2 if len(sys.argv) > 2 else None, folder=sys.argv[1])
print("result", found.steps, found.stopped_early, found.losses[:3])
"""


@pytest.fixture(scope="module")
def script(home: Path) -> Path:
    """No `if __name__ == "__main__"`: ranks are not started from this file."""
    path = home / "script.py"
    path.write_text(SCRIPT)
    return path


def test_plain_python(home: Path, script: Path, trained: Done) -> None:
    done = watch((sys.executable, str(script), "runs/python", "here"), home)
    assert done.status == 0, done.text
    assert losses(home / "runs" / "python") == losses(home / "runs" / "whole")
    assert sum(line.startswith("result 60 False (5.") for line in done.lines) == 1


def test_torchrun_stops_and_saves(home: Path, script: Path, trained: Done) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), "runs/torchrun")
    done = watch(command, home, until="step    3 ", act=lambda act: act.send(signal.SIGTERM))
    assert done.status != 0
    assert "stopped   at step" in done.text, done.text
    results, whole = losses(home / "runs" / "torchrun"), losses(home / "runs" / "whole")
    assert results == {step: whole[step] for step in results}
    assert list((home / "runs" / "torchrun" / "checkpoints").glob("step-*"))


def test_the_command_is_a_rank_under_torchrun(home: Path, trained: Done) -> None:
    """Started by torchrun, on one node or on several, `weft train` plans for the job's ranks and speaks once."""
    job = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    done = watch((*job, WEFT, "train", "recipe.toml", "--run-folder", "runs/job"), home)
    assert done.status == 0, done.text
    assert sum(line.startswith("plan      data 2 = 2 processes") for line in done.lines) == 1, done.text
    assert sum(line.startswith("next      ") for line in done.lines) == 1, done.text
    assert losses(home / "runs" / "job") == losses(home / "runs" / "whole")


def test_weft_launch_stops_and_saves(home: Path, script: Path, trained: Done) -> None:
    command = (WEFT, "launch", "-n", "2", str(script), "runs/launch")
    done = watch(command, home, until="step    3 ", act=lambda act: act.send(signal.SIGINT))
    assert done.status == 0, done.text  # the script ended by itself, and well
    assert sum("True (5." in line for line in done.lines) == 2, done.text
    results, whole = losses(home / "runs" / "launch"), losses(home / "runs" / "whole")
    assert results == {step: whole[step] for step in results}


LOOP = """
import sys
import torch
import weft
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs, labels = torch.randn(44, 6), torch.randint(0, 3, (44,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=8)

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), float(len(batch[1]))

with weft.session(folder=sys.argv[1], quiet=True) as session:
    state = session.prepare(model, optimizer, loader, loss=loss)
    losses = [state.step(batch).loss for batch in state.batches(7)]
    losses.append(state.evaluate(loader))  # 44 samples: the last batch is half full
    state.save()
    if session.rank == 0:
        print("losses", *losses)
"""


def test_a_loop_of_ones_own_is_the_same_on_one_rank_and_on_two(home: Path) -> None:
    (home / "loop.py").write_text(LOOP)
    alone = watch((sys.executable, "loop.py", "runs/alone"), home)
    two = watch((WEFT, "launch", "-n", "2", "loop.py", "runs/two"), home)

    def shown(done: Done) -> list[float]:
        assert done.status == 0, done.text
        (line,) = [line for line in done.lines if line.startswith("losses")]
        return [float(word) for word in line.split()[1:]]

    assert len(shown(alone)) == 8
    assert shown(two) == pytest.approx(shown(alone), rel=1e-5)
