"""Checkpoints that somebody changed who also repaired all digests: refused with file and field, passed over for the one
before, or of no consequence; never another exception, and never another training."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from forge import forgeries, text_of, write_forged

from weft.errors import CheckpointError, DataError
from weft.run.checkpoint import Checkpointer
from weft.techniques.core import CheckpointShard, NestedSplit, Split

SHAPE = torch.Size((4, 6))


def split_shards(step: int) -> list[CheckpointShard]:
    """A cut matrix in two parts, a whole vector and a frozen number, in files of 64 bytes."""
    whole = torch.arange(24.0).view(SHAPE) + step
    parts = [NestedSplit((Split(dim=0, parts=2, index=index),)) for index in range(2)]
    cut = [
        CheckpointShard(name="model/a", shape=SHAPE, tensor=part.slice(whole).view(-1), split=part) for part in parts
    ]
    vector = CheckpointShard(name="model/b", shape=torch.Size((30,)), tensor=torch.arange(30.0) * step)
    same = CheckpointShard(name="model/c", shape=torch.Size((30,)), tensor=torch.arange(30.0) - step)
    return [
        *cut,
        vector,
        same,
        CheckpointShard(name="model/d", shape=torch.Size(), tensor=torch.full((1,), float(step))),
    ]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for step in (10, 20):
        Checkpointer(tmp_path, file_bytes=64).save(step, split_shards(step), {"step": step, "note": ["x", 1.5]})
    return tmp_path


def loaded(folder: Path) -> float | None:
    """Load the newest; the step whose tensors all came back bit for bit, None for an error of Weft's."""
    shards = split_shards(0)
    try:
        Checkpointer(folder).load("latest", shards)
    except (CheckpointError, DataError):
        return None
    step = float(shards[-1].tensor)
    assert all(torch.equal(one.tensor, two.tensor) for one, two in zip(shards, split_shards(int(step)), strict=True))
    return step


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("part", ["index", "manifest"])
def test_a_forged_field_never_loads_anything_else(saved: Path, part: str, seed: int) -> None:
    folder, seen = saved / "step-000020", set[float | None]()
    index = json.loads((folder / "rank-00000.json").read_bytes())
    manifest = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    for what, changed in forgeries(index if part == "index" else manifest, seed, 2):
        if part == "index":
            write_forged(folder, text_of(changed), json.loads(json.dumps(manifest)))
        else:
            write_forged(folder, None, changed)
        try:
            results = loaded(saved)
        except Exception as problem:
            raise AssertionError(what) from problem
        assert results in (10, 20), what
        seen.add(results)
    assert seen == {10, 20} or part == "index"


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("token", "not hexadecimal!", "manifest.json: manifest.token is 'not hexadecimal!', but should be 16 hexa"),
        ("token", " 1234567890abcde", "manifest.token is"),
        ("token", "f" * 16, "below 2"),
        ("token", "1" * 40, "manifest.token is"),
        ("step", 21, "manifest.json"),
        ("step", True, "manifest.step is True, but should be a whole number from 0"),
        ("sequence", -1, "manifest.sequence is -1"),
        ("world", 2, "indexes is .* but should be the index of each of its 2 ranks"),
        ("state", {"data": {"cursor": math.nan}}, "is not readable as JSON .NaN is no number of JSON"),
        ("state", [], r"manifest.state is \[\], but should be an object"),
        ("extra", 1, "manifest.'extra' belongs to no such file"),
        ("provenance", {"torch": 3}, "manifest.provenance.torch is 3, but should be a text"),
    ],
)
def test_a_forged_manifest_names_file_and_field(
    saved: Path, name: str, value: Any, match: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved / "step-000020"
    manifest = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    write_forged(folder, None, {**manifest, name: value})
    if name != "step" or value is True:  # alone, a folder may have any name
        with pytest.raises(CheckpointError, match=match):
            Checkpointer(saved).load(folder, split_shards(0))
    with caplog.at_level(logging.WARNING):
        assert loaded(saved) == 10
    assert "step-000020 is passed over" in caplog.text
    assert Checkpointer(saved).latest() == saved / "step-000010"


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("shape", [2**61, 2**61], r"rank-00000.json: runs\[0\].shape is \[2305"),
        ("shape", [2**40], r"rank-00000.json"),
        ("split", [0, 2**40, 0, 1], r"runs\[0\].split is .* of the shape \[4, 6\]"),
        ("dtype", "F4", r"runs\[0\].dtype is 'F4', but should be one of F64"),
        ("length", 10**9, r"runs\[0\].length is 1000000000"),
        ("key", "model/b", r"runs\[0\].key is 'model/b', but should be the name of its tensor"),
        ("name", "model/b", r"runs\[0\].key is"),
    ],
)
def test_a_forged_index_names_file_and_field(saved: Path, field: str, value: Any, match: str) -> None:
    folder = saved / "step-000020"
    index = json.loads((folder / "rank-00000.json").read_bytes())
    manifest = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    index["runs"][0][field] = value
    write_forged(folder, text_of(index), manifest)
    with pytest.raises(CheckpointError, match=match):
        Checkpointer(saved).load(folder, split_shards(0))
    assert loaded(saved) == 10


def test_an_empty_tensor_of_countless_parts_is_refused_at_once(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(
        1, [CheckpointShard(name="model/e", shape=torch.Size((0, 3)), tensor=torch.empty(0))], {}
    )
    folder = tmp_path / "step-000001"
    index = json.loads((folder / "rank-00000.json").read_bytes())
    index["runs"][0]["split"] = [0, 2**60, 0, 2**60]
    write_forged(folder, text_of(index), json.loads((folder / "manifest.json").read_bytes())["manifest"])
    with pytest.raises(CheckpointError, match="split is"):
        Checkpointer(tmp_path).load(folder, [])


def test_pipes_links_and_giants_in_the_place_of_json_are_refused(saved: Path) -> None:
    path = saved / "step-000020" / "manifest.json"
    original = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    assert loaded(saved) == 10
    path.unlink()
    path.symlink_to(saved / "step-000010" / "manifest.json")
    assert loaded(saved) == 10
    path.unlink()
    path.write_bytes(original)
    os.truncate(path, 1 << 40)  # sparse
    assert loaded(saved) == 10
