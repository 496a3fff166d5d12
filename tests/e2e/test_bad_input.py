"""Bad input at the command line: one paragraph that says what to change, exit status 2, never a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from weft.cli import run
from weft.run.launch.launcher import ForkServer, RankError

HERE = Path(__file__).parent
WEFT = str(Path(sys.executable).with_name("weft"))

RECIPE = """
[model]
reference = "decoder"
num_layers = 4
hidden_size = 32
num_heads = 4
num_kv_heads = 2
vocabulary_size = 300
sequence_length = 16

[data]
train = [{ source = "synthetic" }]
validation_fraction = 0.0
cache = "cache"

[batch]
global_batch_size = 8

[optimizer]
learning_rate = 1e-2

[run]
steps = 2
"""
TEXT = RECIPE.replace('"synthetic"', '"corpus"')


def change(old: str, new: str, text: str = RECIPE) -> str:
    assert old in text
    return text.replace(old, new)


def model(lines: str) -> str:
    """The recipe with another model."""
    return f"[model]\n{lines}\n" + RECIPE[RECIPE.index("[data]") :]


def factory(function: str, more: str = "") -> str:
    return model(f'factory = "{function}"\nsequence_length = 16\n{more}')


@dataclass(frozen=True)
class Outcome:
    status: int
    text: str
    """What went to stderr."""


class Bench:
    """A folder with a sound recipe and what else a case needs; runs the command line in it."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capfd = capfd

    def weft(self, *arguments: str) -> Outcome:
        """Run one command; a traceback fails the test."""
        self._capfd.readouterr()
        status = run(list(arguments))
        shown = self._capfd.readouterr()
        assert "Traceback" not in shown.out + shown.err
        return Outcome(status, shown.err)

    def refuses(self, *arguments: str, match: str, status: int = 2) -> None:
        results = self.weft(*arguments)
        assert re.search(match, results.text), results.text
        assert results.status == status
        paragraph = results.text.rstrip().rsplit("\n\n", maxsplit=1)[-1]
        assert len(paragraph.splitlines()) <= 15
        if status == 2 and "--plan" not in arguments:
            assert not (self.folder / "runs").exists(), "a refused run left a folder"

    def write(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return name


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
    before = list(sys.path)
    bench = Bench(tmp_path, capfd)
    bench.write("recipe.toml", RECIPE)
    bench.write("corpus/text.txt", "".join(f"line {number} of some text\n" for number in range(400)))
    yield bench
    sys.path[:] = before


# ── recipes ───────────────────────────────────────────────────────────────────────────────────────────────────────────

RECIPES = {
    "typo in a key": (
        change("global_batch_size", "global_batch_sise"),
        r"bad.toml, line 17: batch.global_batch_sise is not a setting. Did you mean global_batch_size\?",
    ),
    "unknown section": (change("[optimizer]", "[optimiser]"), "line 19: optimiser is not a setting. Did you mean opt"),
    "text for a number": (change("steps = 2", 'steps = "two"'), 'line 23: run.steps = "two" is not a whole number'),
    "broken TOML": (RECIPE + "\nlast = [1,", "bad.toml, line 25: invalid value, in `last"),
    "section twice": (RECIPE + "\n[run]\nsteps = 3", "cannot declare .* twice"),
    "not UTF-8": (
        RECIPE.encode() + b"# \xff",
        "bad.toml, line 24: byte 0xff is not UTF-8 text. Save the file as UTF-8",
    ),
    "heads that do not divide": (
        change("num_heads = 4", "num_heads = 5"),
        "num_heads = 5 does not divide hidden_size = 32. Use 4 or 8",
    ),
    "unknown compression": (RECIPE + '[permit]\ncompression = ["int9"]', "is not a compression. Did you mean int8"),
    "split that matches nothing": (
        RECIPE + '[model.split]\n"blocks.*.nothing" = "column"',
        r'model.split: "blocks.\*.nothing" matches no module of the model',
    ),
    "freeze that matches nothing": (
        change("[data]", 'freeze = ["nothing.*"]\n[data]'),
        r'model.freeze: "nothing.\*" matches no parameter',
    ),
    "group that matches nothing": (
        change("[run]", 'groups = [{ match = "nothing.*", weight_decay = 0.1 }]\n[run]'),
        r"optimizer.groups\[0\].match = 'nothing.\*' matches none of the .* trainable parameters",
    ),
    "batches of no evaluation": (
        RECIPE + "evaluate_batches = 3",
        "run.evaluate_batches = 3 is not used without evaluate_every. Give both, or neither",
    ),
    "masks for a decoder": (
        change('cache = "cache"', 'cache = "cache"\nmask_fraction = 0.3'),
        "data.mask_fraction = 0.3 is for a masked language model, and this one does causal_lm. Remove it",
    ),
    "tokenizer for random tokens": (
        change('cache = "cache"', 'cache = "cache"\ntokenizer = "a.json"'),
        'data.tokenizer = "a.json" is for text, and no source has any. Remove it',
    ),
    "setting that nothing reads": (
        change("[run]", 'name = "sgd"\nbetas = [0.9, 0.99]\n[run]'),
        'optimizer.betas = .* is not used with name = "sgd". Remove it, or use name = "adamw" or "lamb"',
    ),
    "factory of a missing module": (factory("no_module:build"), "there is no module no_module. Install its package"),
    "missing factory": (factory("bad_models:lineer"), r"bad_models has no lineer. Did you mean linear\?"),
    "factory of a number": (factory("bad_models:number"), "returns a int: bad_models.number.. was not called"),
    "factory that raises": (factory("bad_models:broken"), "raised ValueError: no such width. Make bad_models.broken"),
    "factory with other arguments": (
        factory("bad_models:linear", "arguments = { widht = 3 }"),
        r"got an unexpected keyword argument 'widht'. Did you mean width\? Its signature is \(width",
    ),
    "factory that does not compile": (factory("bad_syntax:build"), "importing bad_syntax raised SyntaxError"),
    "no Hugging Face config": (
        model('hf = "corpus"\nsequence_length = 16'),
        "there is no file corpus/config.json. Give a local folder",
    ),
    "no Hugging Face folder": (model('hf = "nowhere"\nsequence_length = 16'), "there is no file nowhere"),
    "broken Hugging Face config": (model('hf = "broken"\nsequence_length = 16'), "config.json is not readable as JSON"),
    "unknown Hugging Face model": (model('hf = "strange"\nsequence_length = 16'), "transformers cannot read strange"),
    "impossible Hugging Face model": (
        model('hf = "odd"\nsequence_length = 16'),
        r'model.hf = "odd": its config.json makes no gpt2: num_heads = 4 does not divide hidden_size = 33',
    ),
    "missing corpus": (
        change('"corpus"', '"corpsu"', TEXT),
        r"The data source corpsu does not exist .*Did you mean corpus\?",
    ),
    "corpus behind a broken link": (change('"corpus"', '"dangling.txt"', TEXT), "is a link to nowhere, which does not"),
    "empty corpus": (change('"corpus"', '"empty.txt"', TEXT), "The corpus empty.txt is empty: 1 files with 0 bytes"),
    "folder without text": (
        change('"corpus"', '"bare"', TEXT),
        "The folder bare has no text, .jsonl or .parquet files",
    ),
    "text that is not UTF-8": (
        change('"corpus"', '"latin.txt"', TEXT),
        r"latin.txt is not UTF-8: byte 0xe9 at offset 3, line 1. Convert it \(iconv",
    ),
    "JSONL without its field": (
        change('"corpus"', '"records.jsonl"', TEXT),
        r'records.jsonl, line 2: there is no string in the field "text" \(it has txt\)',
    ),
    "images for a language model": (
        change('"corpus"', '"digits"', TEXT),
        "The source digits has images, but the model reads tokens",
    ),
    "cache that is a file": (
        change('"cache"', '"empty.txt"', TEXT),
        "cannot be written to empty.txt/.* Set data.cache",
    ),
    "missing tokenizer": (
        change('cache = "cache"', 'cache = "cache"\ntokenizer = "none.json"', TEXT),
        "The tokenizer none.json does not exist. Give a tokenizer.json, or leave data.tokenizer out",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_bad_recipe(bench: Bench, name: str) -> None:
    content, match = RECIPES[name]
    for path, text in {
        "empty.txt": b"",
        "latin.txt": "café\n".encode("latin1") * 50,
        "records.jsonl": b'{"text": "one"}\n{"txt": "two"}\n',
        "broken/config.json": b"{broken",
        "strange/config.json": b'{"model_type": "strange"}',
        "odd/config.json": b'{"model_type": "gpt2", "n_embd": 33, "n_head": 4}',
        "bad_syntax.py": b"def build(:",
    }.items():
        bench.write(path, text)
    (bench.folder / "bare").mkdir()
    (bench.folder / "dangling.txt").symlink_to("nowhere")
    bench.refuses("train", bench.write("bad.toml", content), match=match)


def test_recipe_that_is_no_file(bench: Bench) -> None:
    (bench.folder / "link.toml").symlink_to("nowhere.toml")
    bench.refuses("train", "recipee.toml", match=r"recipee.toml does not exist. Did you mean recipe.toml\?")
    bench.refuses("train", "corpus", match="corpus is a folder, not a recipe file. It holds no .toml file")
    bench.refuses("train", "link.toml", match="link.toml is a link to nowhere.toml, which does not exist")


# ── plans ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

PLANS = {
    "indivisible batch": ("[mesh]\nreplicate = 3", r"makes a global batch .* is 8.\nUse per_step = \[3, 3, 2\]"),
    "indivisible heads": ("[mesh]\ntensor = 3", r"tensor = 3 does not divide num_heads = 4.*\nUse 1 or 2"),
    "stages without blocks": (
        "[mesh]\npipeline = 6",
        r"makes 6 stages of 4 blocks: some would be empty.\nUse 4 or less",
    ),
    "wrong number of processes": (
        "[mesh]\nreplicate = 2\n[microbatch]\nsize = 4",
        r"makes 2 processes \(data 2\), but there are 3.\nUse replicate = 3, or 2 processes",
    ),
    "precision that is not permitted": (
        '[microbatch]\nsize = 8\n[compute]\nprecision = "bf16"',
        r'"bf16" is not permitted by the recipe, .*\nUse "fp32", or permit.precision',
    ),
    "unknown device": (
        '[compute]\ndevice = "tpu"',
        r'device = "tpu" is not one of "auto", "cpu", "cuda". Did you mean',
    ),
    "technique of tomorrow": ("[microbatch]\nsize = 8\n[mesh]\nexpert = 3", "has not got expert parallelism|expert"),
    "pair that cannot compose": (
        '[mesh]\npipeline = 3\n[pipeline_parallel]\nschedule = "zbv"\nchunks_per_rank = 2\n[compute]\ncompile = true',
        r'compile = true cannot join schedule = "zbv".*\nUse false, or schedule = "1f1b"|makes 6 stages of 4 blocks',
    ),
    "ZeRO-3 over nothing": (
        "[mesh]\nreplicate = 3\n[data_parallel]\nzero = 3\n[microbatch]\nper_step = [3, 3, 2]",
        r"zero = 3 shards the weights over mesh.shard only.*\nUse replicate = 1 and shard = 3",
    ),
    "typo in a key": ("[mesh]\ntensr = 3", r"mesh.tensr is not a setting. Did you mean tensor\?"),
}


@pytest.mark.parametrize("name", PLANS)
def test_bad_plan(bench: Bench, name: str) -> None:
    content, match = PLANS[name]
    processes = ("--processes", "3") if "processes" in name else ()
    plan = bench.write("plan.toml", content)
    bench.refuses("train", "recipe.toml", "--plan", plan, *processes, match=f"plan[. ].*({match})")


def test_plan_that_is_no_file(bench: Bench) -> None:
    bench.refuses("train", "recipe.toml", "--plan", "none/plan.toml", match="there is no folder none")
    bench.refuses("train", "recipe.toml", "--plan", "corpus", match="corpus is a folder, not a plan file")


def test_device_that_is_not_here(bench: Bench) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    plan = bench.write("plan.toml", '[microbatch]\nsize = 8\n[compute]\ndevice = "cuda"')
    bench.refuses("train", "recipe.toml", "--plan", plan, match='this machine has no accelerator .*Use device = "auto"')


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("trian", "recipe.toml"), 'Unknown command "trian". Did you mean "train"'),
        (("train", "recipe.toml", "--proceses", "2"), r"Unknown option: --proceses. Did you mean --processes\?"),
        (("train",), "RECIPE requires an argument"),
        (("train", "recipe.toml", "--processes", "two"), 'unable to convert "two" into int'),
        (("train", "recipe.toml", "--processes", "0"), "processes = 0 is too few. Use 1 or more"),
        (
            ("train", "recipe.toml", "--processes", "100"),
            r"cannot share the recipe's global_batch_size = 8.*\nUse proc",
        ),
        (("train", "recipe.toml", "--set", "recipe.run.steps"), "gives no value. Write --set recipe.run.steps=VALUE"),
        (
            ("train", "recipe.toml", "--set", "recipe.run.stepps=3"),
            r"\(from --set\) is not a setting. Did you mean steps",
        ),
        (("train", "recipe.toml", "--set", "run.steps=3"), "settings begin with recipe. or plan."),
        (("train", "recipe.toml", "--set", "plan.mesh.tensor=3"), r"tensor = 3 \(from --set\) does not divide"),
        (
            ("train", "recipe.toml", "--run-folder", "corpus"),
            "corpus is there already and not empty. Give a new folder",
        ),
        (("train", "recipe.toml", "--run-folder", "recipe.toml"), "recipe.toml is a file, and a run needs a folder"),
        (
            ("train", "recipe.toml", "--run-folder", "recipe.toml/x"),
            "the run folder recipe.toml/x cannot be made: Not a",
        ),
        (("train", "recipe.toml", "--run-folder", "/proc/run"), "the run folder /proc/run cannot be made"),
        (("train", "recipe.toml", "--resume", "runs/none"), "runs/none is no folder of a run: it does not exist"),
        (("train", "recipe.toml", "--resume", "corpus"), "corpus has nothing to go on with: no save has finished"),
        (("train", "recipe.toml", "--resume", "latest"), "no run in .*runs/ has saved anything yet"),
        (("train", "recipe.toml", "--resume", "a", "--run-folder", "b"), "goes on in its own folder.*Leave one out"),
        (("plan", "recipe.toml", "--cluster", "4x8xh1000"), r"h1000 is not in the device table. Did you mean h100\?"),
        (("plan", "recipe.toml", "--output", "corpus"), "corpus cannot be written: Is a directory. Name a file"),
        (("plan", "recipe.toml", "--output", "/dev/full"), "/dev/full cannot be written: No space left on device"),
        (("generate", "runs/none"), "runs/none is no folder of a run: it does not exist"),
        (("generate", "corpus"), "corpus has no recipe.toml and tokenizer.json, so it is no run that trained on text"),
        (("launch", "-n", "2", "none.py"), "there is no script none.py .*Give the path of a Python file"),
        (("launch", "-n", "0", "recipe.toml"), "num_processes = 0: a job has at least 1 process"),
        (("data", "prepare", "nowhere"), "The data source nowhere does not exist"),
        (
            ("data", "prepare", "corpus", "--vocabulary-size", "10", "--cache", "c"),
            "Set vocabulary_size to at least 258",
        ),
    ],
)
def test_bad_command(bench: Bench, arguments: tuple[str, ...], match: str) -> None:
    bench.refuses(*arguments, match=match)
    assert sorted(path.name for path in (bench.folder / "corpus").iterdir()) == ["text.txt"]


def test_as_a_process(tmp_path: Path) -> None:
    """Through the installed command: status 2, nothing on stdout, one line on stderr."""
    done = subprocess.run([WEFT, "train", "none.toml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "none.toml does not exist.\n"


# ── data that have been prepared ──────────────────────────────────────────────────────────────────────────────────────


def test_corrupt_shard_and_large_tokenizer(bench: Bench) -> None:
    assert bench.weft("data", "prepare", "corpus", "--folder", "shards", "--vocabulary-size", "290").status == 0
    recipe = bench.write("text.toml", change('"corpus"', '"shards"', TEXT))
    small = change("vocabulary_size = 300", "vocabulary_size = 270", change('"corpus"', '"shards"', TEXT))
    bench.refuses("train", bench.write("small.toml", small), match="has 290 tokens.*270")
    shard = max((path for path in (bench.folder / "shards").iterdir()), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    bench.refuses("train", recipe, match=f"{shard.name}.*(digest|damaged|corrupt)")


# ── what only ranks can find ──────────────────────────────────────────────────────────────────────────────────────────

ONE = "[microbatch]\nsize = 8\n"


def test_damaged_and_foreign_checkpoints(bench: Bench) -> None:
    bench.write("one.toml", ONE)
    train = ("train", "recipe.toml", "--plan", "one.toml")
    assert bench.weft(*train, "--run-folder", "run").status == 0
    before = (bench.folder / "run" / "recipe.toml").read_bytes()
    more = ("--resume", "run", "--set", "recipe.run.steps=3")
    wider = ("--set", "recipe.model.hidden_size=64")
    fewer = ("--set", "recipe.batch.global_batch_size=4", "--set", "plan.microbatch.size=4")
    bench.refuses(*train, *more, *fewer, match="saved with batch.global_batch_size = 8, but the recipe now says 4")
    bench.refuses(*train, *more, *wider, match="does not fit: .* shapes differ.*Load it with the sizes of the recipe")
    assert (bench.folder / "run" / "recipe.toml").read_bytes() == before, "a refused resume must not touch the run"
    (file,) = (bench.folder / "run").glob("checkpoints/step-000002/*.safetensors")
    file.write_bytes(file.read_bytes()[:-64])
    bench.refuses(*train, *more, match="step-000002.*(short|bytes|damaged)")


def test_nan_everywhere_ends_the_run(bench: Bench) -> None:
    recipe = factory("bad_models:poisoned", 'arguments = { how = "nan" }').replace("steps = 2", "steps = 9")
    bench.write("nan.toml", recipe.replace("[run]", "[run]\nmax_skipped_steps = 2"))
    bench.write("one.toml", ONE)
    match = r"3 steps in a row up to step 3 had a loss or gradient that is not finite .*Lower optimizer.learning_rate"
    bench.refuses("train", "nan.toml", "--plan", "one.toml", match=match)


def test_token_out_of_range_in_a_users_model_names_rank_and_line(bench: Bench) -> None:
    """Not input that Weft can judge: status 1, and the user's own line."""
    bench.write("poisoned.toml", factory("bad_models:poisoned", 'arguments = { how = "range" }'))
    match = r"rank \d of 2 on host \S+ stopped: IndexError: index out of range in self(.|\n)*bad_models.py, line"
    bench.refuses("train", "poisoned.toml", "--processes", "2", match=match, status=1)


def test_error_of_a_worker_is_raised_in_python(bench: Bench, fork_server: ForkServer) -> None:
    import weft

    bench.write("poisoned.toml", factory("bad_models:poisoned", 'arguments = { how = "raise" }'))
    before = fork_server.num_jobs
    with pytest.raises(RankError, match="rank 1 of 2 .*ValueError: a width of 7 was not expected") as caught:
        weft.train("poisoned.toml", processes=2, quiet=True, fork_server=fork_server)
    assert fork_server.num_jobs == before + 1
    assert (caught.value.rank, caught.value.kind) == (1, "ValueError")
