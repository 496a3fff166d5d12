"""Data sets that `datasets` saved to disk: rows, classes, splits, orders, text, and files that are not as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_datasets import IMAGE, classes, packed, picture, recipe_of, save_dataset, save_splits, value

from weft.config.recipe import DataSource
from weft.errors import DataError
from weft.model.families import SampleField
from weft.run.data import DataShape
from weft.run.data.preparation import prepare, prepare_data

NAMED = {"pixel_values": SampleField((3, 8, 8), "float32"), "labels": SampleField((), "int64", 2)}
SHAPE = DataShape(task="fields", fields=NAMED)
SENTENCE = "this is the text number {}, and no other\n"
TEXT = DataShape(task="causal_lm", sequence_length=8, vocabulary_size=300)


def images(folder: Path, count: int = 5, **settings: Any) -> Path:
    columns = {
        "img": [packed(picture(at)) for at in range(count)],
        "label": [at % 2 for at in range(count)],
    }
    return save_dataset(folder, columns, {"img": IMAGE, "label": classes("dog", "cat")}, **settings)


def texts(folder: Path, count: int = 9, **settings: Any) -> Path:
    columns = {
        "content": [SENTENCE.format(at) for at in range(count)],
        "label": [("good", "bad")[at % 2] for at in range(count)],
    }
    return save_dataset(folder, columns, {"content": value("string"), "label": value("string")}, **settings)


def test_images_with_declared_classes(tmp_path: Path) -> None:
    prepared = prepare_data(recipe_of(images(tmp_path / "set", cuts=(2, 2, 3)), columns={"image": "img"}), SHAPE)
    assert "5 samples" in prepared.description[0]
    assert "2 classes: dog = 0, cat = 1" in prepared.description[0]
    values = prepared.train.sets[0].open().read(np.array([4, 1, 2]), np.arange(3))
    assert values["labels"].tolist() == [0, 1, 0]
    expected = np.stack([np.asarray(picture(at), np.float32).transpose(2, 0, 1) / 255 for at in (4, 1, 2)])
    assert (values["pixel_values"] == expected).all()


def test_the_model_numbers_the_classes_by_name(tmp_path: Path) -> None:
    shape = DataShape(task="fields", fields=NAMED, classes={"cat": 0, "dog": 1})
    prepared = prepare_data(recipe_of(images(tmp_path / "set"), columns={"image": "img"}), shape)
    assert prepared.train.sets[0].open().read(np.arange(3), np.arange(3))["labels"].tolist() == [1, 0, 1]


def test_a_column_of_another_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 0 has no field pixel_values or image \(it has img, label\).* mean img"):
        prepare_data(recipe_of(images(tmp_path / "set")), SHAPE)
    with pytest.raises(DataError, match="columns names imag, which is not looked for in rows. Did you mean image?"):
        prepare_data(recipe_of(tmp_path / "set", columns={"imag": "img"}), SHAPE)


def test_rows_in_the_order_of_a_selection(tmp_path: Path) -> None:
    """As releases before 2.0 saved it: the whole, and which of its rows are meant."""
    shape = DataShape(task="fields", fields={"labels": SampleField((), "int64", 9)})
    columns = {"labels": "content"}
    ours = texts(tmp_path / "set", cuts=(3,), indices=[4, 0, 3])
    prepared = prepare_data(recipe_of(ours, columns=columns), shape)
    assert "3 samples" in prepared.description[0]
    assert "3 classes: " in prepared.description[0]
    assert prepared.train.sets[0].open().read(np.arange(3), np.arange(3))["labels"].tolist() == [2, 0, 1]
    other = texts(tmp_path / "other", cuts=(3,), indices=[3, 0, 4])
    assert prepare_data(recipe_of(other, columns=columns), shape).fingerprint != prepared.fingerprint
    with pytest.raises(DataError, match="points at row 9, and there are 9"):
        prepare_data(recipe_of(texts(tmp_path / "far", indices=[9]), columns=columns), shape)


def test_splits(tmp_path: Path) -> None:
    folder = save_splits(tmp_path / "sets", ["train", "test"])
    images(folder / "train", 5)
    images(folder / "test", 3)
    both = recipe_of(folder, validation=(DataSource(source=str(folder)),), columns={"image": "img"})
    prepared = prepare_data(both, SHAPE)
    assert prepared.train.sets[0].open().size == 5
    assert prepared.validation[0].open().size == 3
    assert "its split train" in prepared.description[0]
    assert "not read" not in prepared.description[0]
    alone = prepare_data(recipe_of(folder, columns={"image": "img"}), SHAPE)
    assert "its split train; test not read" in alone.description[0]
    named = prepare_data(recipe_of(folder / "test", columns={"image": "img"}), SHAPE)
    assert named.train.sets[0].open().size == 3
    save_splits(folder, ["test", "dev"])
    with pytest.raises(DataError, match="has the splits test, dev, and none of them is called train"):
        prepare_data(recipe_of(folder, columns={"image": "img"}), SHAPE)


def test_corpora_are_the_texts_alone(tmp_path: Path) -> None:
    """The same tokens as those of the same texts in a file of JSON lines; not its JSON files, not its other columns."""
    folder = save_splits(tmp_path / "sets", ["train"])
    texts(folder / "train", 40, cuts=(7,))
    lines = [json.dumps({"content": SENTENCE.format(at)}) for at in range(40)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    cache = str(tmp_path / "cache")
    columns = {"text": "content"}
    ours = prepare_data(recipe_of(folder, columns=columns, cache=cache), TEXT)
    theirs = prepare_data(recipe_of(tmp_path / "lines.jsonl", columns=columns, cache=cache), TEXT)
    first, second = (one.train.sets[0].open().read(np.arange(9), np.arange(9)) for one in (ours, theirs))
    assert (first["tokens"] == second["tokens"]).all()
    with pytest.raises(DataError, match='has no column "text" of texts; its columns are content, label'):
        prepare([folder], vocabulary_size=300, cache=cache)
    with pytest.raises(DataError, match="columns names label, but a language model reads text alone"):
        prepare_data(recipe_of(folder, columns={"label": "content"}), TEXT)


@pytest.mark.parametrize("seed", range(4))
def test_a_file_that_is_cut_is_named(tmp_path: Path, seed: int) -> None:
    folder = texts(tmp_path / "set", 50, cuts=(20,))
    file = folder / "data-00001-of-00002.arrow"
    content = file.read_bytes()
    file.write_bytes(content[: int(np.random.default_rng(seed).integers(0, len(content) - 1))])
    with pytest.raises(DataError, match="data-00001-of-00002.arrow is cut short"):
        prepare_data(recipe_of(folder), SHAPE)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("state.json", "{}", "names no files"),
        ("state.json", '{"_data_files": [{"filename": "../x.arrow"}]}', "an older form"),
        ("state.json", '{"_data_files": [{"filename": "absent.arrow"}]}', "absent.arrow, which does not exist"),
        ("state.json", '{"_data_files": 3}', "names no files"),
        ("state.json", "[1", "state.json"),
        ("dataset_info.json", "{}", "does not say what the columns are"),
    ],
)
def test_a_folder_that_is_not_as_saved(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = texts(tmp_path / "set")
    (folder / file).write_text(content)
    with pytest.raises(DataError, match=message):
        prepare_data(recipe_of(folder), SHAPE)


def test_texts_as_classes(tmp_path: Path) -> None:
    named = {"x": SampleField((2,), "float32"), "labels": SampleField((), "int64", 3)}
    rows = [{"x": [0.0, 1.0], "label": name} for name in ("sad", "glad", "sad", "mad")]
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    prepared = prepare_data(recipe_of(file), DataShape(task="fields", fields=named))
    assert "3 classes: glad = 0, mad = 1, sad = 2" in prepared.description[0]
    assert prepared.train.sets[0].open().read(np.arange(4), np.arange(4))["labels"].tolist() == [2, 0, 2, 1]


def test_no_rows(tmp_path: Path) -> None:
    folder = texts(tmp_path / "set", 0)
    named = {"labels": SampleField((), "int64", 2)}
    with pytest.raises(DataError, match="has no samples for all"):
        prepare_data(recipe_of(folder), DataShape(task="fields", fields=named))
