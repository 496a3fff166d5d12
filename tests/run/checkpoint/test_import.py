"""Weights that other programs saved: converted, matched to a recipe, and never run."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn

import weft
from weft.api.saving.import_weights import import_weights
from weft.cli import run
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    DecoderShape,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    RunRecipe,
    dump_recipe,
)
from weft.errors import CheckpointError
from weft.model.build import build_model
from weft.run.checkpoint.export import read_tensors
from weft.run.checkpoint.foreign._sources import read_source

SHAPE = DecoderShape(num_layers=2, hidden_size=16, num_heads=2, vocabulary_size=300, sequence_length=8)


def recipe_of(folder: Path) -> Recipe:
    (folder / "corpus").mkdir(exist_ok=True)
    for number in range(4):
        (folder / "corpus" / f"{number}.txt").write_text("".join(f"{number} says {line}\n" for line in range(200)))
    return Recipe(
        model=ModelRecipe(reference="decoder", shape=SHAPE),
        data=DataRecipe(
            train=(DataSource(source=str(folder / "corpus")),), cache=str(folder / "cache"), validation_fraction=0.2
        ),
        batch=BatchRecipe(global_batch_size=4),
        optimizer=OptimizerRecipe(learning_rate=1e-2, average_decay=0.9),
        run=RunRecipe(steps=2),
    )


def weights_of(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Drawn values for the model of a recipe, under the names that a plain module would save."""
    generator = torch.Generator().manual_seed(5)
    module = build_model(recipe).module
    return {name: torch.rand(tensor.shape, generator=generator) for name, tensor in module.named_parameters()}


def test_a_file_becomes_a_run_that_trains_from_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of(tmp_path)
    weights = weights_of(recipe)
    content = {
        "model_state_dict": {f"module.{name}": tensor for name, tensor in weights.items()},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}},
        "epoch": 3,
    }
    torch.save(content, tmp_path / "theirs.pt")
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe))
    paths = [str(tmp_path / "theirs.pt"), str(tmp_path / "ours"), "--recipe", str(tmp_path / "recipe.toml")]
    assert run(["checkpoint", "import", *paths]) == 0
    said = capsys.readouterr().out
    assert "names     without 'module.', which stood before each" in said
    assert "left out  optimizer (1 entries), epoch (int)" in said
    assert f"train     weft train {tmp_path}/recipe.toml --resume {tmp_path}/ours" in said
    for prefix in ("model/", "average/"):
        stored = dict(read_tensors(tmp_path / "ours", prefix))
        assert stored.keys() == weights.keys()
        assert all(torch.equal(stored[name], weights[name]) for name in weights)
    result = weft.train(recipe, processes=1, resume=tmp_path / "ours", prove="never", quiet=True)
    assert len(result.losses) == 2
    assert sorted(path.name for path in (tmp_path / "ours").iterdir() if "converted" in path.name) == []


def test_names_and_shapes_that_differ_are_told_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tmp_path)
    weights = weights_of(recipe)
    first = next(name for name in weights if name.endswith("norm.weight") or "weight" in name)

    def imported(changed: dict[str, torch.Tensor], **keywords: Any) -> object:
        torch.save(changed, tmp_path / "theirs.pt")
        source = read_source(tmp_path / "theirs.pt")  # in this process, which is quicker
        scratch = tmp_path / "scratch"
        monkeypatch.setattr(
            "weft.api.saving.import_weights.convert", lambda *_args, **_keywords: _converted(source, scratch)
        )
        return import_weights(tmp_path / "theirs.pt", tmp_path / "new", recipe=recipe, **keywords)

    misspelt = {(f"{name}s" if name == first else name): tensor for name, tensor in weights.items()}
    with pytest.raises(CheckpointError, match=rf"lacks 1 of the model's .*: {first}. .*Did you mean {first}s"):
        imported(misspelt)
    with pytest.raises(
        CheckpointError, match=r"has 1 tensors that the model has not: rotary. Leave them out by --igno"
    ):
        imported({**weights, "rotary": torch.ones(2)})
    with pytest.raises(CheckpointError, match=rf"1 shapes differ: {first} is \[3\] there and"):
        imported({**weights, first: torch.ones(3)})
    assert not (tmp_path / "new").exists()
    assert imported({**weights, "rotary": torch.ones(2)}, ignore=["rot*"])


def _converted(source: dict[str, Any], scratch: Path) -> object:
    from safetensors.torch import save_file

    from weft.run.checkpoint.foreign import Converted, ForeignWeights

    scratch.mkdir(exist_ok=True)
    save_file({name: leaf.fetch().contiguous() for name, leaf in source.items()}, scratch / "weights.safetensors")
    weights = ForeignWeights([scratch / "weights.safetensors"])
    return Converted(weights=weights, key="", left_out=(), is_confined=True)


@pytest.fixture
def distributed(tmp_path: Path) -> Path:
    """A distributed checkpoint, as torch writes it."""
    state = {
        "model": {"a.weight": torch.arange(12.0).view(4, 3), "b": torch.ones(2, dtype=torch.bfloat16)},
        "optim": {"state": {"a.weight": {"exp_avg": torch.zeros(4, 3)}}},
        "epoch": 3,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it saves on one process
        distributed_checkpoint.save(state, checkpoint_id=tmp_path / "distributed", no_dist=True)
    return tmp_path / "distributed"


def test_a_distributed_checkpoint_is_read_without_its_pickles(distributed: Path) -> None:
    tree = read_source(distributed)
    assert torch.equal(tree["model"]["a.weight"].fetch(), torch.arange(12.0).view(4, 3))
    assert tree["model"]["b"].dtype == torch.bfloat16
    assert tree["epoch"] is None


CALLS_SYSTEM = b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch CANARY\x85R."
EVIL_METADATA = {
    "stack global": CALLS_SYSTEM,
    "global": b"cos\nsystem\n(S'touch CANARY'\ntR.",
    "inst": b"(S'touch CANARY'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'touch CANARY'\no.",
    "eval": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x051 + 1\x85R.",
    "torch's own": b"\x80\x04\x8c\x05torch\x8c\x04load\x93\x8c\x01x\x85R.",
    "reduce of no class": b"\x80\x04K\x01K\x02\x85R.",
    "build of no record": b"\x80\x04K\x01}b.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"Pcanary\n.",
    "nested keys": b"\x80\x04}" + b"))\x86" * 2 + b"K\x01s.",
    "empty": b"",
    "end": b".",
    "text": b"hello",
    "other": b"\x80\x04}.",
}


@pytest.mark.parametrize("kind", EVIL_METADATA)
def test_evil_metadata_runs_nothing(distributed: Path, tmp_path: Path, kind: str) -> None:
    canary = tmp_path / "canary"
    (distributed / ".metadata").write_bytes(EVIL_METADATA[kind].replace(b"CANARY", str(canary).encode()))
    with pytest.raises(CheckpointError, match=r"Nothing of it was run|damaged|does not describe"):
        read_source(distributed)
    assert not canary.exists()


@pytest.mark.parametrize("place", ["/etc/passwd", "../__0_0.distcp", "__0_1.distcp", "./0_0.distcp"])
def test_no_file_outside_of_the_folder_is_read(distributed: Path, place: str) -> None:
    name = b"__0_0.distcp"
    content = (distributed / ".metadata").read_bytes()
    changed = content.replace(bytes([len(name)]) + name, bytes([len(place)]) + place.encode())
    frame = int.from_bytes(changed[3:11], "little") + len(changed) - len(content)
    (distributed / ".metadata").write_bytes(changed[:3] + frame.to_bytes(8, "little") + changed[11:])
    with pytest.raises(CheckpointError, match=r"none of its folder|is missing"):
        read_source(distributed)


def test_every_changed_byte_of_metadata_is_an_error_or_reads_tensors(distributed: Path) -> None:
    path = distributed / ".metadata"
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(bytes(changed))
        try:
            read_source(distributed)
        except CheckpointError:
            continue


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.check_call, (["touch", str(self.canary)],)


def test_evil_files_run_nothing_and_there_is_no_other_way(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    torch.save({"a": torch.ones(2), "b": Evil(canary)}, tmp_path / "new.pt")
    torch.save({"b": Evil(canary)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    (tmp_path / "raw.bin").write_bytes(CALLS_SYSTEM.replace(b"CANARY", str(canary).encode()))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", CALLS_SYSTEM.replace(b"CANARY", str(canary).encode()))
        archive.writestr("archive/version", "3")
    (tmp_path / "archive.pt").write_bytes(buffer.getvalue())
    for name in ("new.pt", "old.pt", "module.pt", "raw.bin", "archive.pt"):
        with pytest.raises(CheckpointError, match="cannot be read as tensors and plain values alone"):
            read_source(tmp_path / name)
    assert not canary.exists()


CONFINED = """
import socket, subprocess, threading
import torch
from weft.run.checkpoint.foreign._confine import confine_calls, confine_memory
assert confine_calls()
confine_memory(1 << 28, 60)
for attempt in (
    lambda: socket.socket(),
    lambda: subprocess.run(["true"]),
    lambda: torch.empty(1 << 30, dtype=torch.uint8),
):
    try:
        attempt()
    except (PermissionError, RuntimeError, MemoryError, BlockingIOError) as problem:
        print(type(problem).__name__)
threading.Thread(target=lambda: print("threads")).start()
"""


def test_the_process_opens_no_connection_starts_no_program_and_takes_no_more_memory() -> None:
    done = subprocess.run([sys.executable, "-c", CONFINED], capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout.split()
    assert said[:2] == ["PermissionError", "PermissionError"], done.stderr
    assert said[-2:] == ["RuntimeError", "threads"]
