"""Samples with named fields: made up as a model takes them, or from files, with the line of what is wrong."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.errors import DataError
from weft.model.families import SampleField
from weft.run.data import PreparedData
from weft.run.data._named import FileFields, SyntheticFields
from weft.run.data._open_rows import digest_of
from weft.run.data._reader import TrainReader, TrainSpec
from weft.run.data._samples import FieldSpec

NAMED = {
    "input_ids": SampleField((6,), "int64", 20, prompt=(7, 2)),
    "pixel_values": SampleField((1, 2, 3), "float32"),
    "decoder_input_ids": SampleField((4,), "int64", 20, follows=("labels", 3)),
    "labels": SampleField((4,), "int64", 20),
}
IDS = np.arange(3)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def row(**changes: Any) -> dict[str, Any]:
    usual = {"input_ids": [7, 7, 1, 2, 5, 6], "pixel_values": [[[0.0, 1, 2], [3, 4, 5]]], "labels": [4, 5]}
    return {**usual, **changes}


def opened(path: Path) -> FileFields:
    return FileFields(path, NAMED, "all", 0.0)


def test_made_up_samples_are_permissible_and_the_same_again() -> None:
    samples = SyntheticFields(NAMED, 100, "train")
    values = samples.read(np.arange(100), np.arange(100))
    assert (values["input_ids"][:, :2] == 7).all()
    assert not (values["input_ids"][:, 2:] == 7).any()
    assert values["labels"].min() >= 0
    assert values["labels"].max() < 20
    assert (values["decoder_input_ids"][:, 0] == 3).all()
    assert (values["decoder_input_ids"][:, 1:] == values["labels"][:, :-1]).all()
    again = samples.read(np.array([42]), np.array([42]))
    assert all((again[name][0] == values[name][42]).all() for name in NAMED)


def test_rows_of_a_file(tmp_path: Path) -> None:
    samples = opened(write(tmp_path / "train.jsonl", [row(), row(labels=[1, 2, 3, -100])]))
    values = samples.read(np.array([0, 1]), IDS[:2])
    assert values["input_ids"].tolist()[0] == [7, 7, 1, 2, 5, 6]
    assert values["labels"].tolist() == [[4, 5, -100, -100], [1, 2, 3, -100]]
    assert values["decoder_input_ids"].tolist() == [[3, 4, 5, 3], [3, 1, 2, 3]]
    assert values["pixel_values"].dtype == np.float32


def test_fields_in_files_beside_the_data(tmp_path: Path) -> None:
    np.save(tmp_path / "image.npy", np.ones((1, 2, 3), np.float32))
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.array([16384, -32768], "<i2").tobytes())
    named = {"image": SampleField((1, 2, 3), "float32"), "sound": SampleField((4,), "float32")}
    path = write(tmp_path / "train.jsonl", [{"image": "image.npy", "sound": "sound.wav"}])
    values = FileFields(path, named, "all", 0.0).read(np.array([0]), IDS[:1])
    assert values["image"].sum() == 6
    assert values["sound"].tolist() == [[0.5, -1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("channels", "values", "message"),
    [(1, 5, "5 values of sound, more than it takes. Cut it"), (2, 4, "2 channels; one is read. Mix them into one")],
)
def test_sounds_lose_nothing_in_silence(tmp_path: Path, channels: int, values: int, message: str) -> None:
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.ones(values, "<i2").tobytes())
    path = write(tmp_path / "train.jsonl", [{"sound": "sound.wav"}])
    samples = FileFields(path, {"sound": SampleField((4,), "float32")}, "all", 0.0)
    with pytest.raises(DataError, match=message):
        samples.read(np.array([0]), IDS[:1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [4, 20]}, r"train.jsonl:2 has 20 in its labels, but the model takes labels as 4 whole numbers"),
        ({"input_ids": [1] * 7}, r"input_ids of shape \(7,\)"),
        ({"input_ids": [7, 7, 1, 2]}, r"input_ids of shape \(4,\)"),
        ({"pixel_values": [1.0]}, r"pixel_values of shape \(1,\), .* 1 × 2 × 3 numbers"),
        ({"input_ids": [0.5]}, r"has '\[0.5\]' as its input_ids"),
        ({"pixel_values": "../out.npy"}, "lies outside the folder"),
        ({"pixel_values": "absent.npy"}, "absent.npy"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    samples = opened(write(tmp_path / "train.jsonl", [row(), row(**changes)]))
    with pytest.raises(DataError, match=message):
        samples.read(np.array([1]), IDS[:1])


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    samples = opened(write(tmp_path / "train.jsonl", [{"text": "no"}]))
    with pytest.raises(DataError, match=r"train.jsonl:1 has no field input_ids \(it has text\)"):
        samples.read(np.array([0]), IDS[:1])
    (tmp_path / "train.jsonl").write_text("[1, 2]\n")
    with pytest.raises(DataError, match="is no object with named fields"):
        opened(tmp_path / "train.jsonl")


def test_parquet_says_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    rows = [row(), row(labels=[1])]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    ours = opened(tmp_path / "train.parquet").read(np.array([0, 1]), IDS[:2])
    theirs = opened(write(tmp_path / "train.jsonl", rows)).read(np.array([0, 1]), IDS[:2])
    assert all((ours[name] == theirs[name]).all() for name in NAMED)


def test_splits_are_apart_and_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [row(labels=[at]) for at in range(20)])
    specs = {
        split: FieldSpec(file=str(path), split=split, validation_fraction=0.3, named=NAMED, digest=digest_of(path))
        for split in ("train", "validation")
    }
    seen = {
        split: {int(value) for value in spec.open().read(np.arange(spec.open().size), IDS)["labels"][:, 0]}
        for split, spec in specs.items()
    }
    assert seen["train"] | seen["validation"] == set(range(20))
    assert not seen["train"] & seen["validation"]


def test_prepared_data_travel(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [row() for _ in range(4)])
    spec = FieldSpec(file=str(path), split="all", validation_fraction=0.0, named=NAMED, digest=digest_of(path))
    train = TrainSpec(sets=(spec,), weights=(1.0,), seed=1, global_batch_size=2)
    prepared = PreparedData(train=train, validation=(), tokenizer=None, description=(), fingerprint="")
    there = PreparedData.from_json(prepared.to_json())
    assert there == prepared
    assert set(TrainReader(there.train, 0, 2).read(0)) == {*NAMED, "sample_ids"}
