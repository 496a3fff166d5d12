"""Ejected scripts: readable by the project's own rules, free of Weft, and with the losses of `weft train`."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from pool import RankPool

from weft.cli._eject import eject_script
from weft.config.plan import parse_plan
from weft.config.recipe import ModelRecipe, load_recipe, parse_recipe
from weft.errors import PlanError, RecipeError
from weft.interop.eject import check_ejectable
from weft.model.description import facts_of
from weft.techniques.check import check_plan

ROOT = Path(__file__).parents[3]
WEFT = str(Path(sys.executable).with_name("weft"))
PATIENCE_SECONDS = 300
WARM_SECONDS = 120
MAX_LINES = 250
RECIPE = """
[model]
reference = "decoder"
num_layers = 4
hidden_size = 32
num_heads = 4
num_kv_heads = 2
vocabulary_size = 300
sequence_length = 32

[data]
train = [{ source = "corpus", weight = 3 }, { source = "synthetic", weight = 1 }]
validation_fraction = 0.3
cache = "cache"

[batch]
global_batch_size = 8

[optimizer]
learning_rate = 3e-3
weight_decay = 0.1
schedule = "cosine"
warmup_steps = 2
max_grad_norm = 0.5

[run]
steps = 6

[permit]
precision = ["fp32", "bf16", "fp64"]
"""
UNTIED = RECIPE.replace("sequence_length = 32", "sequence_length = 32\ntie_embeddings = false\nffn_size = 48")
LLAMA = re.sub(
    r"\[model\].*?\[data\]", '[model]\nhf = "llama.json"\nsequence_length = 32\n\n[data]', RECIPE, flags=re.S
)
OWN = re.sub(
    r"\[model\].*?\[data\]",
    '[model]\nfactory = "own_model:build"\nsequence_length = 32\n[model.arguments]\nwidth = 16\n\n[data]',
    RECIPE,
    flags=re.S,
)
OWN_MODEL = """
from torch import nn


class Own(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(300, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 300)

    def forward(self, tokens):
        return 2.0 * self.head(nn.functional.gelu(self.hidden(self.embedding(tokens))))


def build(width):
    return Own(width)
"""
LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
HALVES = "[microbatch]\nsize = 2\nper_step = 2\n"
QUARTERS = "[microbatch]\nsize = 1\nper_step = 4\n"
WHOLE = "[microbatch]\nsize = 4\nper_step = 2\n"
SIX = {
    "zero1": "[mesh]\nreplicate = 2\n[data_parallel]\nzero = 1\n" + HALVES,
    "zero3": "[mesh]\nshard = 2\n[data_parallel]\nzero = 3\n" + HALVES,
    "tensor": "[mesh]\ntensor = 2\n" + WHOLE,
    "pipeline": "[mesh]\npipeline = 2\n[microbatch]\nsize = 2\nper_step = 4\n",
    "three_d": "[mesh]\npipeline = 2\nreplicate = 2\ntensor = 2\n[data_parallel]\nzero = 1\n" + QUARTERS,
    "hybrid": "[mesh]\nreplicate = 2\nshard = 2\n[data_parallel]\nzero = 3\n[microbatch]\nsize = 1\nper_step = 2\n",
}
MORE = {
    "one": WHOLE,
    "recomputed": WHOLE + '[memory]\nrecompute = "full"\n',
    "zero0": "[mesh]\nreplicate = 2\n[data_parallel]\nzero = 0\n" + HALVES,
    "zero2": "[mesh]\nshard = 2\n[data_parallel]\nzero = 2\n" + HALVES,
    "unequal": "[mesh]\nreplicate = 2\n[microbatch]\nsize = 2\nper_step = [3, 1]\n",
    "sequence": "[mesh]\ntensor = 2\n[tensor_parallel]\nsequence = true\n" + WHOLE,
    "gpipe": '[mesh]\npipeline = 3\n[pipeline_parallel]\nschedule = "gpipe"\n[microbatch]\nsize = 2\nper_step = 4\n',
    "zero3_pipeline": "[mesh]\nshard = 2\npipeline = 2\n[data_parallel]\nzero = 3\n" + QUARTERS,
    "zero3_once": SIX["zero3"].replace("zero = 3", 'zero = 3\nreduce_every = "step"'),
    "hybrid_once": SIX["hybrid"].replace("zero = 3", 'zero = 3\nreduce_every = "step"'),
    "zero3_tensor": "[mesh]\nshard = 2\ntensor = 2\n[data_parallel]\nzero = 3\n" + HALVES,
}
"""Plans beyond the six, which run on ranks that have torch imported already."""
BF16 = {
    "bf16": WHOLE + '[compute]\nprecision = "bf16"\n',
    "bf16_zero1": SIX["zero1"] + '[compute]\nprecision = "bf16"\n',
    "bf16_tensor": SIX["tensor"] + '[compute]\nprecision = "bf16"\n',
    "bf16_zero3": SIX["zero3"] + '[compute]\nprecision = "bf16"\n',
}
CASES = (
    *(("tied", name, plan) for name, plan in MORE.items()),
    *(("untied", name, SIX[name]) for name in ("tensor", "pipeline", "zero3")),
    *(("llama", name, {**SIX, **MORE}[name]) for name in ("one", "zero1", "zero3", "tensor", "pipeline")),
    *(("own", name, {**SIX, **MORE}[name]) for name in ("one", "zero1", "zero3")),
)
BF16_TOLERANCE = 2e-3
"""Between ways to order sums in bf16; these runs lie within 6e-4 of fp32 (2026-11, CPU)."""

Reference = Callable[[str, str], list[float]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes, a corpus of twelve texts, a config and a module of one's own."""
    folder = tmp_path_factory.mktemp("eject")
    for name, text in {"tied": RECIPE, "untied": UNTIED, "llama": LLAMA, "own": OWN}.items():
        (folder / f"{name}.toml").write_text(text)
    (folder / "llama.json").write_text(json.dumps(LLAMA_CONFIG))
    (folder / "own_model.py").write_text(OWN_MODEL)
    (folder / "corpus").mkdir()
    for number in range(12):
        words = (f"text {number} says {line * number % 97} and {line} again\n" for line in range(120))
        (folder / "corpus" / f"{number}.txt").write_text("".join(words))
    return folder


@pytest.fixture(scope="module")
def reference(home: Path) -> Reference:
    """Losses of `weft train` on one process: what every plan gives, as the parity tests show."""
    known: dict[tuple[str, str], list[float]] = {}

    def losses(recipe: str, precision: str = "fp32") -> list[float]:
        if (recipe, precision) not in known:
            (home / "one.toml").write_text(WHOLE + f'[compute]\nprecision = "{precision}"\n')
            run = f"runs/{recipe}-{precision}"
            command = [WEFT, "train", f"{recipe}.toml", "--plan", "one.toml", "--run-folder", run]
            done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
            assert done.returncode == 0, done.stdout + done.stderr
            lines = [json.loads(line) for line in (home / run / "metrics.jsonl").read_text().splitlines()]
            known[recipe, precision] = [line["loss"] for line in lines if line["kind"] == "step"]
        return known[recipe, precision]

    return losses


def write_script(home: Path, recipe: str, name: str, plan: str) -> tuple[Path, int]:
    """Eject, check the text, and return the script with its number of ranks."""
    loaded = parse_plan(plan)
    with contextlib.chdir(home):
        read = load_recipe(f"{recipe}.toml")
        check_plan(loaded, read, facts_of(read))
        script = home / f"{recipe}_{name}.py"
        sys.path.insert(0, str(home))
        try:
            eject_script(read, loaded, script)
        finally:
            sys.path.remove(str(home))
    text = script.read_text()
    assert "import weft" not in text
    assert "from weft" not in text
    ruff = str(Path(sys.executable).with_name("ruff"))
    settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(script)]
    for command in ([ruff, "check", *settings], [ruff, "format", "--check", *settings]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return script, loaded.mesh.world_size


def losses_in(text: str) -> list[float]:
    return [float(results[1]) for results in re.finditer(r"^step +\d+  loss ([\d.]+)", text, re.M)]


def run_warm(script: str, port: int) -> str:
    """Run a script as torchrun would, in a child of this rank, and return what it printed.

    A child, because DTensor keeps the meshes of a script alive, and their sockets, until its process ends.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    gc.collect()
    printed = Path(script).with_suffix(f".{rank}.txt")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.chdir(Path(script).parent)
            sys.path.insert(0, str(Path(script).parent))  # as python does for a script
            warnings.filterwarnings(
                "ignore", r".*torch\.jit\.\w+` is deprecated.*", DeprecationWarning
            )  # torch.distributed.optim
            with printed.open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                try:
                    runpy.run_path(script, run_name="__main__")
                    status = 0
                except BaseException:
                    traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + WARM_SECONDS
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    assert ended[1] == 0, printed.read_text()
    return printed.read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_alone(script: Path, world: int) -> str:
    """Run a script as its first lines say, and return what it printed."""
    start = ["-m", "torch.distributed.run", "--master-port", str(free_port()), "--nproc-per-node", str(world)]
    command = [sys.executable, *(start if world > 1 else []), str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SIX)
def test_six_plans_under_torchrun(home: Path, reference: Reference, name: str) -> None:
    script, world = write_script(home, "tied", name, SIX[name])
    assert len(script.read_text().splitlines()) < MAX_LINES
    assert losses_in(run_alone(script, world)) == pytest.approx(reference("tied", "fp32"), abs=1e-5)


@pytest.mark.parametrize(("recipe", "name", "plan"), CASES, ids=[f"{recipe}-{name}" for recipe, name, _ in CASES])
def test_other_plans_and_models(
    home: Path, reference: Reference, ranks: RankPool, recipe: str, name: str, plan: str
) -> None:
    script, world = write_script(home, recipe, name, plan)
    printed = ranks.run(world, run_warm, str(script), free_port(), timeout=WARM_SECONDS)
    assert losses_in(printed[0]) == pytest.approx(reference(recipe, "fp32"), abs=1e-5)
    assert list(home.glob(f"{script.stem}.trained.safetensors")) or list(home.glob(f"{script.stem}.stage-*"))


@pytest.mark.parametrize("name", BF16)
def test_bf16_keeps_fp32_masters(home: Path, reference: Reference, ranks: RankPool, name: str) -> None:
    script, world = write_script(home, "tied", name, BF16[name])
    printed = ranks.run(world, run_warm, str(script), free_port(), timeout=WARM_SECONDS)
    assert losses_in(printed[0]) == pytest.approx(reference("tied", "bf16"), abs=BF16_TOLERANCE)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ('[mesh]\npipeline = 2\n[pipeline_parallel]\nschedule = "zbv"\nchunks_per_rank = 2\n' + WHOLE, "zbv.*Use"),
        (WHOLE + '[memory]\nrecompute = "selective"\n', "selective"),
        (
            '[mesh]\nshard = 2\npipeline = 2\n[data_parallel]\nzero = 3\nreduce_every = "microbatch"\n' + QUARTERS,
            'reduce_every = "microbatch": torch\'s own schedules.*Use "step"',
        ),
        (WHOLE + '[compute]\nbackend = "weft"\n', "torch alone, which has Gloo"),
        (WHOLE + "[compute]\ncollective_timeout_seconds = 9.0\n", "as long as torch does by itself. Leave it out"),
        ('[mesh]\nshard = 2\n[data_parallel]\nalgorithm = "ring"\n' + HALVES, '"ring".*own collectives. Use "auto"'),
        ('[mesh]\nshard = 2\n[data_parallel]\ncompression = "int8"\n' + HALVES, "sums gradients as they are"),
        (
            "[mesh]\nreplicate = 2\n[data_parallel]\nzero = 0\nlocal_steps = 9\n" + HALVES,
            "over all data ranks in every step",
        ),
        (
            "[mesh]\nshard = 2\n[data_parallel]\nzero = 3\n[microbatch]\nsize = 2\nper_step = [3, 1]\n",
            r"per_step = \[3, 1\].*equal shares, or zero = 1",
        ),
        ("[mesh]\ncontext = 2\n" + WHOLE, "context"),
        (
            '[mesh]\nshard = 2\ntensor = 2\norder = ["tensor", "pipeline", "replicate", "shard", "expert", "context"]\n'
            "[data_parallel]\nzero = 3\n" + HALVES,
            "Put tensor last",
        ),
    ],
)
def test_plans_without_a_script_are_refused(plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_ejectable(parse_recipe(RECIPE), parse_plan(plan))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("learning_rate = 3e-3", 'name = "lamb"\nlearning_rate = 3e-3'), "lamb.*adamw"),
        (("validation_fraction", 'documents = "isolated"\nvalidation_fraction'), "isolated"),
        (('reference = "decoder"', 'reference = "decoder"\nfreeze = ["embedding.*"]'), "freeze"),
    ],
)
def test_recipes_without_a_script_are_refused(change: tuple[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_ejectable(parse_recipe(RECIPE.replace(*change)), parse_plan(WHOLE))


def test_other_tasks_than_the_next_token_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", "architectures": ["CLIPModel"]}))
    recipe = replace(parse_recipe(RECIPE), model=ModelRecipe(hf=str(tmp_path), sequence_length=8))
    with pytest.raises(RecipeError, match="the script does not know the loss of a CLIPModel"):
        check_ejectable(recipe, parse_plan(WHOLE))


def test_the_command_writes_script_and_companions(home: Path) -> None:
    (home / "plan.toml").write_text(SIX["zero1"])
    folder = home / "out"
    folder.mkdir(exist_ok=True)
    command = [WEFT, "plan", "tied.toml", "--plan", "plan.toml", "--eject", "out/train.py"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["train.order.npy", "train.py", "train.tokens"]
    assert "torchrun --nproc-per-node 2 train.py" in (folder / "train.py").read_text()
    shutil.rmtree(folder)
