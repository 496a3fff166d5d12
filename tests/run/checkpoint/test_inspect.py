"""`weft checkpoint`: listing, verifying, comparing, pinning and removing what runs have saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.cli import run
from weft.errors import CheckpointError
from weft.run.checkpoint import Checkpointer
from weft.run.checkpoint.inspect import compare, list_checkpoints, pin, prune
from weft.techniques.core import CheckpointShard


def shard(name: str, tensor: torch.Tensor) -> CheckpointShard:
    return CheckpointShard(name=name, shape=tensor.shape, tensor=tensor.reshape(-1))


def save(folder: Path, step: int, value: float = 1.0, *, keep: int = 9, extra: bool = False) -> Path:
    names = ["model/a", "optimizer/exp_avg/a", *(["model/b"] if extra else [])]
    shards = [shard(name, torch.full((4, 3), value)) for name in names]
    return Checkpointer(folder, keep=keep).save(step, shards, {"data": {"cursor": step}})


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(tmp_path / "run" / "checkpoints", step, float(step))
    return tmp_path / "run" / "checkpoints"


def test_what_is_there_is_listed_and_shown(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = list_checkpoints(checkpoints.parent)
    assert [entry.step for entry in entries] == [30, 20, 10]
    assert [entry.is_newest for entry in entries] == [True, False, False]
    assert run(["checkpoint", "ls", str(checkpoints.parent)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4
    assert said[1].split()[0] == "30"
    assert said[1].endswith("newest")
    assert run(["checkpoint", "show", str(checkpoints.parent)]) == 0
    said = capsys.readouterr().out
    assert "step-000030" in said
    assert "optimizer/exp_avg" in said
    assert "{'cursor': 30}" in said


def test_damage_is_found_and_the_sound_ones_are_named(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (checkpoints / "step-000020").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run(["checkpoint", "verify", str(checkpoints.parent)]) == 2
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["sound", "damaged", "sound"]
    assert "does not match its digest" in said.err
    assert run(["checkpoint", "verify", str(checkpoints / "step-000010")]) == 0


def test_two_are_compared_tensor_by_tensor(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = save(checkpoints.parent / "other", 30, 30.0)
    assert run(["checkpoint", "diff", str(checkpoints / "step-000030"), str(same)]) == 0
    assert "2 tensors are equal bit for bit, 0 differ" in capsys.readouterr().out
    other = save(checkpoints.parent / "third", 31, 33.0, extra=True)
    difference = compare(checkpoints / "step-000030", other)
    assert difference.num_equal == 0
    assert [(one.name, one.only_in) for one in difference.tensors][1] == ("model/b", "second")
    assert difference.tensors[0].largest == 3.0
    assert difference.tensors[0].relative == pytest.approx(0.1)
    assert difference.state == ("data.cursor",)
    assert run(["checkpoint", "diff", str(checkpoints / "step-000030"), str(other)]) == 1


def test_what_is_pinned_stays(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "pin", str(checkpoints / "step-000010")]) == 0
    save(checkpoints, 40, keep=2)
    assert [entry.step for entry in list_checkpoints(checkpoints)] == [40, 30, 10]
    assert [Path(place).name for place in prune(checkpoints.parent, 1)] == ["step-000030"]
    pin(checkpoints / "step-000010", is_pinned=False)
    assert run(["checkpoint", "prune", str(checkpoints.parent), "--keep", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 removed"
    assert [entry.step for entry in list_checkpoints(checkpoints)] == [40]


def test_nothing_goes_while_the_newest_is_damaged(checkpoints: Path) -> None:
    next(iter((checkpoints / "step-000030").glob("*.safetensors"))).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        prune(checkpoints.parent, 1)
    assert len(list_checkpoints(checkpoints)) == 3
    with pytest.raises(CheckpointError, match="Keep at least 1"):
        prune(checkpoints.parent, 0)
