"""Bad input at every door beside `weft train`, chosen and drawn: one paragraph, status 2, never a traceback.

Drawn are documents (a recipe, a plan, a cluster) and command lines that were sound before something was changed in
them: each is obeyed or refused.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.cli import run
from weft.config.cluster import dump_cluster, resolve_cluster
from weft.config.plan import Plan, dump_plan
from weft.errors import WeftError
from weft.run.data.preparation import prepare

RECIPE = """
[model]
reference = "decoder"
num_layers = 2
hidden_size = 32
num_heads = 4
num_kv_heads = 2
vocabulary_size = 300
sequence_length = 16

[data]
train = [{ source = "synthetic" }]
validation_fraction = 0.0

[batch]
global_batch_size = 8

[optimizer]
name = "adamw"
learning_rate = 1e-2
betas = [0.9, 0.99]

[run]
steps = 2
seed = 3
"""
PARAGRAPH_LINES, SECONDS = 15, 20.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with sound documents, to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "plan.toml").write_text(dump_plan(Plan(), everything=True))
    (tmp_path / "cluster.toml").write_text(dump_cluster(resolve_cluster("2x8xh100")))
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)))
    (tmp_path / "empty.toml").touch()
    images = RECIPE[: RECIPE.index("num_layers")].replace("decoder", "convnet") + "num_layers = 2\nchannels = 16\n"
    images += '[data]\ntrain = [{ source = "digits" }]\n[batch]\nglobal_batch_size = 1_000_000_000\n[run]\nsteps = 2\n'
    (tmp_path / "images.toml").write_text(images)
    (tmp_path / "number.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "script.py").write_text("raise SystemExit(0)\n")
    os.mkfifo(tmp_path / "pipe.toml")
    return tmp_path


def outcome(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and what went to stderr, of a command that must have ended soon and without a traceback."""
    capfd.readouterr()
    begun = time.monotonic()
    status = run(arguments)
    shown = capfd.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert time.monotonic() - begun < SECONDS
    return status, shown.err


def is_a_paragraph(text: str) -> bool:
    """Whether a refusal is one: some lines without an empty one between them."""
    lines = text.strip().splitlines()
    return 0 < len(lines) <= PARAGRAPH_LINES and all(line.strip() for line in lines)


COMMANDS: dict[str, tuple[str, str]] = {
    # files that are none
    "a recipe that is a pipe": ("train pipe.toml", "pipe.toml is"),
    "a recipe that leads to itself": ("train loop.toml", "loop.toml is a link to loop.toml, which leads back to it"),
    "a recipe of bytes": ("train binary.toml", "binary.toml.*UTF-8|binary.toml"),
    "an empty recipe": ("train empty.toml", "model"),
    "a recipe without a name": ("train ''", "."),
    "a recipe with a NUL": ("train a\\0b", "."),
    "a recipe with a long name": (f"train {'a' * 5000}", "."),
    "a device as recipe": ("train /dev/zero", "/dev/zero"),
    "a plan that is a pipe": ("train recipe.toml --plan pipe.toml", "pipe.toml is"),
    "a plan that leads to itself": ("train recipe.toml --plan loop.toml", "loop.toml"),
    "an empty name of a plan": ("train recipe.toml --plan ''", "."),
    "a recipe as plan": ("train recipe.toml --plan recipe.toml", "model is not a setting|model"),
    "a plan as recipe": ("train plan.toml", "."),
    "a cluster that is a pipe": ("plan recipe.toml --cluster pipe.toml", "pipe.toml"),
    "a cluster that leads to itself": ("plan recipe.toml --cluster loop.toml", "loop.toml"),
    "an empty cluster": ("plan recipe.toml --cluster empty.toml", "empty.toml"),
    "a plan as cluster": ("plan recipe.toml --cluster plan.toml", "plan.toml"),
    # train
    "resume of a file": ("train recipe.toml --resume text.txt", "text.txt is no folder of a run: it is a file"),
    "resume of nothing": ("train recipe.toml --resume ''", "."),
    "two recipes": ("train recipe.toml recipe.toml", "."),
    "processes below none": ("train recipe.toml --processes -3", "processes = -3"),
    "processes beyond counting": ("train recipe.toml --processes 99999999999999999999", "."),
    "a set of nothing": ("train recipe.toml --set ''", "."),
    "a set without a key": ("train recipe.toml --set =3", "."),
    "a set of a section": ("train recipe.toml --set recipe.run=3", "recipe.run|run"),
    "a set too deep": ("train recipe.toml --set recipe.run.steps.more=3", "steps"),
    "a set that is no TOML": ("train recipe.toml --set recipe.run.steps=[1,", "."),
    "steps beyond counting": ("train recipe.toml --set recipe.run.steps=99999999999999999999999", "steps"),
    "no steps": ("train recipe.toml --set recipe.run.steps=0", "steps = 0"),
    "a rate that is none": ("train recipe.toml --set recipe.optimizer.learning_rate=nan", "learning_rate"),
    "a rate without end": ("train recipe.toml --set recipe.optimizer.learning_rate=inf", "learning_rate"),
    "no batch": ("train recipe.toml --set recipe.batch.global_batch_size=0", "global_batch_size = 0"),
    "a seed below none": ("train recipe.toml --set recipe.run.seed=-1", "seed = -1"),
    "half a process": ("train recipe.toml --processes 1.5", "--processes 1.5 is not a whole number. Give 1 or 2"),
    "processes without end": ("train recipe.toml --processes inf", "--processes inf is not a whole number"),
    "a folder of no name": ("train recipe.toml --run-folder ''", "--run-folder was given an empty text"),
    # plan
    "a batch that no memory holds": (
        "plan images.toml",
        r"No plan fits: a convnet .* recompute none: (?!.*memory.rec)",
    ),
    "half a process to plan": ("plan recipe.toml --processes 2.5", "Give 2 or 3"),
    "no plans to show": ("plan --model gpt2 --cluster 8xh100 --top 0", "--top 0 is too few.*Use 1 or more"),
    "plans below none": ("plan --model gpt2 --cluster 8xh100 --top -3", "--top -3 is too few"),
    "half a plan": ("plan --model gpt2 --cluster 8xh100 --top 2.5", "--top 2.5 is not a whole number"),
    "a price without end": ("plan --model gpt2 --cluster 8xh100 --price inf", "must be a finite number above 0"),
    "a setting of no recipe": ("plan --model gpt2 --cluster 8xh100 --set recipe.run.steps=3", "--set of a recipe"),
    "a question of no words": ("plan --model gpt2 --cluster 8xh100 --why-not ''", "--why-not was given an empty"),
    "another system of no name": ("plan --model gpt2 --cluster 8xh100 --emit ''", "--emit was given an empty text"),
    "pictures in no folder": ("plan --model gpt2 --cluster 8xh100 --plots ''", "--plots was given an empty text"),
    "pictures in a file": ("plan --model gpt2 --cluster 8xh100 --plots text.txt", "--plots text.txt: File exists"),
    "pictures of a plan that is fixed": (
        "plan recipe.toml --processes 2 --plots pictures",
        "--plots ask what a search finds, and --processes leaves it nothing to choose",
    ),
    "files of another system in no folder": (
        "plan --model gpt2 --cluster 8xh100 --for megatron --write-to ''",
        "--write-to was given an empty text",
    ),
    "a rank below none": ("plan recipe.toml --dry-run --rank -1", "Use 0 to 0"),
    "half a rank": ("plan recipe.toml --dry-run --rank 0.5", "--rank 0.5 is not a whole number"),
    "a plan of nothing": ("plan", "."),
    "a plan for two things": ("plan recipe.toml --model gpt2", "."),
    "a model that nobody knows": ("plan --model gpt9 --cluster 8xh100", "Did you mean gpt2"),
    "a cluster without devices": ("plan --model gpt2 --cluster 0xh100", "."),
    "a cluster beyond counting": ("plan --model gpt2 --cluster 9999999999999xh100", "."),
    "a cluster of words": ("plan --model gpt2 --cluster 'eight h100'", "."),
    "an objective that is none": ("plan recipe.toml --objective beauty", "beauty"),
    "tokens that are none": ("plan --model gpt2 --cluster 8xh100 --tokens many", "MANY"),
    "a deadline without tokens": ("plan --model gpt2 --cluster 8xh100 --deadline 3d", "tokens"),
    "a deadline that is none": ("plan --model gpt2 --cluster 8xh100 --tokens 1B --deadline soon", "soon"),
    "a price below none": ("plan --model gpt2 --cluster 8xh100 --price -1", "price"),
    "a system that nobody knows": ("plan --model gpt2 --cluster 8xh100 --for fsdp9", "fsdp9"),
    "a question about nothing": ("plan --model gpt2 --cluster 8xh100 --why-not colour=3", "colour"),
    "a question without a value": ("plan --model gpt2 --cluster 8xh100 --why-not tensor", "tensor"),
    "no sequence": ("plan --model gpt2 --cluster 8xh100 --sequence-length 0", "."),
    "a batch below none": ("plan --model gpt2 --cluster 8xh100 --global-batch-size -8", "."),
    "a batch beside a recipe": ("plan recipe.toml --global-batch-size 8", "."),
    "a rank without a rehearsal": ("plan recipe.toml --rank 3", "dry-run"),
    "an eject into a folder": ("plan recipe.toml --eject .", "."),
    "an output that nobody can write": ("plan recipe.toml --output /nowhere/plan.toml", "/nowhere"),
    # check, describe
    "a check of nothing": ("check nowhere.toml", "nowhere.toml does not exist"),
    "a check of no processes": ("check recipe.toml --processes 0", "processes"),
    "a check of a plan that is none": ("check recipe.toml --plan text.txt", "text.txt"),
    "a description of nothing": ("describe nowhere.toml", "nowhere.toml does not exist"),
    "a description of a folder": ("describe .", "is a folder"),
    "a description of a plan": ("describe recipe.toml --set plan.mesh.tensor=2", "weft describe reads no plan"),
    "a check of half a process": ("check recipe.toml --processes 1.5", "--processes 1.5 is not a whole number"),
    "half a token": ("generate . --tokens 1.5", "--tokens 1.5 is not a whole number"),
    "a run without a name": ("generate ''", "RUN was given an empty text"),
    "a run that is a file": ("generate text.txt", "text.txt is no folder of a run: it is a file"),
    "an export to no name": ("export . ''", "FOLDER was given an empty text"),
    "an export into a file": ("export . text.txt", "text.txt is a file, and an export needs a new folder"),
    "no tokens to add": ("generate . --tokens 0", "."),
    "a temperature below none": ("generate . --temperature -1", "."),
    "a share above all": ("generate . --top-p 1.5", "."),
    "an export of nothing": ("export nowhere out", "nowhere"),
    "an export of a file": ("export text.txt out", "text.txt"),
    "an export of a folder without saves": ("export . out", "."),
    "an export of another kind of number": ("export . out --dtype fp8", "fp8"),
    # comm
    "a picture of nothing": ("comm draw --algorithm circle --processes 4", "circle"),
    "a picture of nobody": ("comm draw --algorithm ring --processes 0", "."),
    "a picture of a crowd": ("comm draw --algorithm ring --processes 99999999", "."),
    "a root that is not there": ("comm draw --algorithm ring --collective broadcast --processes 4 --root 9", "."),
    "nodes that do not add up": ("comm draw --algorithm hierarchical --processes 4 --nodes 3,3", "."),
    "nodes that are none": ("comm draw --algorithm hierarchical --processes 4 --nodes a,b", "."),
    "a picture in another format": ("comm draw --algorithm ring --processes 4 --output picture.doc", "picture.doc|doc"),
    "a picture of no kind": ("comm draw --algorithm ring --processes 4 --output out", "names no kind of picture"),
    "a picture without a name": ("comm draw --algorithm ring --processes 4 --output ''", "--output was given an empty"),
    "pieces that are none": ("comm draw --algorithm ring --processes 4 --pieces 0", "pieces = 0: use 1 or more"),
    "half a piece": ("comm draw --algorithm ring --processes 4 --pieces 1.5", "--pieces 1.5 is not a whole number"),
    "advice about half a parameter": (
        "comm advise --parameters 0.4 --bandwidth 1GB/s --latency 1us --processes 2",
        "--parameters 0.4 is less than one",
    ),
    "advice about a plan": (
        "comm advise recipe.toml --set plan.mesh.tensor=2 --bandwidth 1GB/s --latency 1us",
        "weft comm advise reads no plan",
    ),
    "advice about nothing": ("comm advise", "."),
    "advice about parameters that are none": (
        "comm advise --parameters many --bandwidth 1Gbit/s --latency 1us",
        "(?i)many",
    ),
    "advice at no speed": ("comm advise --parameters 1M --bandwidth 0 --latency 1us --processes 2", "."),
    "advice at a speed that is none": (
        "comm advise --parameters 1M --bandwidth fast --latency 1us --processes 2",
        "fast",
    ),
    "advice for a stage that is none": ("comm advise --parameters 1M --bandwidth 1GB/s --latency 1us --zero 3", "zero"),
    "sizes that are none": ("comm explain --size big", "big"),
    "no ranks to explain": ("comm explain --processes 0", "0 ranks"),
    # probe, launch, data
    "a measurement into a folder": ("probe --output .", "--output . is a folder. Name a file in it"),
    "half a process to measure": ("probe --processes 1.5", "--processes 1.5 is not a whole number"),
    "a launch of half a process": ("launch -n 1.5 script.py", "-n 1.5 is not a whole number"),
    "logs without a folder": ("launch -n 1 --logs '' script.py", "--logs was given an empty text"),
    "tokens of no source": ("data prepare ''", "SOURCES was given an empty text"),
    "tokens of a source and of none": ("data prepare text.txt '' --cache c", "SOURCES was given an empty text"),
    "tokens into no folder": ("data prepare text.txt --folder ''", "--folder was given an empty text"),
    "tokens into a file": ("data prepare text.txt --folder text.txt --vocabulary-size 270", "Not a directory"),
    "a field without a name": ("data prepare text.txt --text-field '' --cache c", "--text-field was given an empty"),
    "half a worker": ("data prepare text.txt --workers 1.5 --cache c", "--workers 1.5 is not a whole number"),
    "a script without a name": ("migrate ''", "SOURCE was given an empty text"),
    "a folder to migrate": ("migrate .", "cannot be read: Is a directory"),
    "a value of no key": ("migrate script.py --fill ''", "--fill was given an empty text"),
    "no time to measure": ("probe --seconds 0", "seconds"),
    "a precision that is none": ("probe --precision fp99", "fp99"),
    "a measurement of nobody": ("probe --processes 0", "processes"),
    "a launch of a folder": ("launch -n 2 .", "there is no script"),
    "a launch without a number": ("launch script.py", "processes"),
    "a launch without threads": ("launch -n 2 --threads 0 script.py", "threads"),
    "a launch below none": ("launch -n -2 script.py", "num_processes = -2"),
    "a launch of no module": ("launch -n 1 -m ''", "."),
    "logs in a file": ("launch -n 1 --logs text.txt script.py", "text.txt"),
    "a text that is a number": ("data prepare number.jsonl --cache c", 'the field "text" holds a number.*in quotes'),
    "a source that leads to itself": ("data prepare loop.toml --cache c", "which leads back to it.*Mend the link"),
    "tokens of an empty file": ("data prepare empty.toml --cache c", "empty"),
    "a vocabulary below none": ("data prepare text.txt --vocabulary-size -1 --cache c", "."),
    "nobody to tokenize": ("data prepare text.txt --workers 0 --cache c", "workers"),
    "a tokenizer that is none": ("data prepare text.txt --tokenizer text.txt --cache c", "text.txt"),
    "a cache in a file": ("data prepare text.txt --cache text.txt", "text.txt"),
}


def words(line: str) -> list[str]:
    import shlex

    return [word.replace("\\0", "\0").replace("a0b", "a\0b") for word in shlex.split(line)]


@pytest.mark.parametrize("name", COMMANDS)
def test_bad_commands(place: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    line, match = COMMANDS[name]
    status, text = outcome(words(line), capfd)
    assert status == 2, text
    assert is_a_paragraph(text), text
    assert re.search(match, text), text
    assert not (place / "runs").exists()


PYTHON: dict[str, tuple[Callable[[], Any], str]] = {
    "train of a number": (lambda: weft.train(3), "3"),  # type: ignore[arg-type]
    "train of no file": (lambda: weft.train("nowhere.toml"), "nowhere.toml does not exist"),
    "train of a folder": (lambda: weft.train("."), "is a folder"),
    "train under a number": (lambda: weft.train("recipe.toml", plan=3), "plan"),  # type: ignore[arg-type]
    "train on words": (lambda: weft.train("recipe.toml", processes="two"), "processes"),  # type: ignore[arg-type]
    "train on nobody": (lambda: weft.train("recipe.toml", processes=0), "processes"),
    "a session under a number": (lambda: weft.session(plan=3).__enter__(), "plan"),  # type: ignore[arg-type]
    "a session on a device that is none": (lambda: weft.session(device="tpu").__enter__(), "tpu"),  # type: ignore[arg-type]
    "a session with a precision that is none": (lambda: weft.session(permit=("fp99",)).__enter__(), "fp99"),  # type: ignore[arg-type]
    "a session with no compression": (lambda: weft.session(compression=("zip",)).__enter__(), "zip"),
    "a session that waits for nothing": (lambda: weft.session(collective_timeout_seconds=0).__enter__(), "timeout"),
    "a session with a seed of words": (lambda: weft.session(seed="one").__enter__(), "seed"),  # type: ignore[arg-type]
    "a session with a seed below none": (lambda: weft.session(seed=-1).__enter__(), "seed"),
    "a session with a setting that is none": (
        lambda: weft.session(plan=Plan(), settings={"mesh.tensr": 2}).__enter__(),
        "tensr",
    ),
    "a session in a file": (lambda: weft.session(folder="text.txt").__enter__(), "text.txt is a file"),
    "a session without a folder": (lambda: weft.session(folder="").__enter__(), "names nothing"),
    "train of None": (lambda: weft.train(None), "'None' is no recipe"),  # type: ignore[arg-type]
    "train on half a process": (lambda: weft.train("recipe.toml", processes=1.5), "processes"),  # type: ignore[arg-type]
    "a check of None": (lambda: weft.check(None), "'None' is no recipe"),  # type: ignore[arg-type]
    "an export of None": (lambda: weft.export(None, "out"), "None is no path"),  # type: ignore[arg-type]
    "an export to nowhere": (lambda: weft.export(".", ""), "names nothing"),
    "a continuation of None": (lambda: weft.generate(None, "a"), "None is no path"),  # type: ignore[arg-type]
    "tokens of a source without a name": (lambda: prepare([""], vocabulary_size=270), "names nothing"),
    "tokens into a folder without a name": (lambda: prepare(["text.txt"], vocabulary_size=270, folder=""), "names"),
    "tokens of one name": (lambda: prepare("text.txt", vocabulary_size=270), "is one name, not a list"),
    "half a vocabulary": (lambda: prepare(["text.txt"], vocabulary_size=270.5), "270.5"),  # type: ignore[arg-type]
    "half a worker": (lambda: prepare(["text.txt"], vocabulary_size=270, workers=1.5), "1.5"),  # type: ignore[arg-type]
    "no worker": (lambda: prepare(["text.txt"], vocabulary_size=270, workers=0), "workers = 0"),
    "a check of nothing": (lambda: weft.check("nowhere.toml", "plan.toml"), "nowhere.toml does not exist"),
    "an export of nothing": (lambda: weft.export("nowhere", "out"), "nowhere"),
    "a continuation of nothing": (lambda: weft.generate("nowhere", "a"), "nowhere"),
    "ranks for nothing": (lambda: weft.spawn(3, processes=2), "is no function"),  # type: ignore[arg-type]
    "ranks for a lambda": (lambda: weft.spawn(lambda: 3, processes=2), "is no function"),
    "ranks that are none": (lambda: weft.spawn(words, processes=0, arguments={"line": "a"}), "at least 1 process"),
    "ranks with other arguments": (lambda: weft.spawn(words, processes=2, arguments={"a": 1}), "do not fit words"),
    "ranks with objects": (lambda: weft.spawn(words, processes=2, arguments={"line": {1}}), "is not sent"),
}


@pytest.mark.parametrize("name", PYTHON)
def test_bad_calls_of_python(place: Path, name: str) -> None:
    call, match = PYTHON[name]
    with pytest.raises(WeftError) as caught:
        call()
    assert caught.value.status == 2
    assert is_a_paragraph(str(caught.value)), str(caught.value)
    assert re.search(match, str(caught.value)), str(caught.value)
    assert not (place / "runs").exists()


VALUES = (
    *("1e300", "nan", "inf", "0", "-1", "true", '""', '"x"', "[]", "{}", "1.5", "1979-05-27", "9" * 30, "1e999"),
    *("[[1]]", '["a"]', "{a = 1}", '"\\u0000"', '"../../etc/passwd"', "07:32:00", "[1, 'a']", "1000000000", "'é'"),
)
DOCUMENTS = {
    "recipe.toml": "describe recipe.toml",
    "plan.toml": "plan recipe.toml --plan plan.toml",
    "cluster.toml": "plan --model gpt2 --cluster cluster.toml",
}


def changed(text: str, draw: random.Random) -> str:
    """A document with one or some lines that are others."""
    lines = text.splitlines()
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(lines))
        key = lines[at].partition("=")[0] if "=" in lines[at] else "x "
        match draw.randrange(6):
            case 0 | 1 | 2:
                lines[at] = f"{key}= {draw.choice(VALUES)}"
            case 3:
                lines[at] = lines[at].replace(draw.choice("aeio_"), draw.choice(("", "_", "x")), 1)
            case 4:
                lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
            case _:
                del lines[at]
    return "\n".join(lines)


SOUND = (
    "train recipe.toml --set recipe.run.steps=0 --processes 2 --run-folder new",
    "plan recipe.toml --plan plan.toml --processes 2 --set plan.mesh.tensor=2",
    "plan --model gpt2 --cluster 2x8xh100 --top 2 --tokens 1B --price 2",
    "plan --model gpt2 --cluster 8xh100 --for megatron --global-batch-size 64",
    "describe recipe.toml --set recipe.model.num_heads=8",
    "comm draw --algorithm ring --processes 4 --pieces 2 --root 0",
    "comm advise --parameters 1M --bandwidth 1GB/s --latency 5us --processes 4 --zero 1",
    "export recipe.toml out --dtype bf16",
    "generate recipe.toml --tokens 5 --top-k 3 --seed 1",
)
"""Command lines that begin no long work, however they are changed."""
WORDS = (
    "",
    "-1",
    "0",
    "nan",
    "x" * 300,
    "é",
    "--",
    "-",
    "--help=3",
    "1e9",
    "two",
    "9" * 30,
    "a=b=c",
    "../..",
    "\x07",
    "2",
)


def changed_line(draw: random.Random) -> list[str]:
    line = words(draw.choice(SOUND))
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(1, len(line))
        match draw.randrange(5):
            case 0:
                del line[at]
            case 1:
                line.insert(at, draw.choice(WORDS))
            case 2:
                line[at] = line[at][:-1] + draw.choice("xyz_")
            case _:
                line[at] = draw.choice(WORDS)
        if len(line) < 2:
            break
    return line


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("seed", range(3))
def test_drawn_documents_are_obeyed_or_refused(
    place: Path, capfd: pytest.CaptureFixture[str], document: str, seed: int
) -> None:
    draw, sound, refused = random.Random(f"{document} {seed}"), (place / document).read_text(), 0
    for _ in range(12):
        text = changed(sound, draw)
        (place / document).write_text(text)
        status, said = outcome(words(DOCUMENTS[document]), capfd)
        assert status in (0, 2), text
        assert (status == 2) == bool(re.search(re.escape(document), said)) or status == 0 or "plan" in said, (
            text,
            said,
        )
        if status == 2:
            assert is_a_paragraph(said), (text, said)
            refused += 1
    assert refused >= 3


@pytest.mark.parametrize("seed", range(4))
def test_drawn_command_lines_are_obeyed_or_refused(place: Path, capfd: pytest.CaptureFixture[str], seed: int) -> None:
    draw, refused = random.Random(seed), 0
    for _ in range(30):
        line = changed_line(draw)
        status, said = outcome(line, capfd)
        assert status in (0, 2), (line, said)
        if status == 2:
            assert is_a_paragraph(said), (line, said)
            refused += 1
    assert refused >= 10
