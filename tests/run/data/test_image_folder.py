"""Folders of images with a folder per class: what is read, in which order, and what is refused by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from saved_datasets import picture, recipe_of, write_images

from weft.config.plan import MicrobatchPlan
from weft.config.recipe import DataSource
from weft.errors import DataError
from weft.model.families import SampleField
from weft.run.data import DataShape, open_data
from weft.run.data.preparation import prepare_data

NAMED = {"pixel_values": SampleField((3, 8, 8), "float32"), "labels": SampleField((), "int64", 3)}
SHAPE = DataShape(task="fields", fields=NAMED)
COUNTS = {"owl": 3, "cat": 5, "dog": 4}


def pixels(number: int) -> NDArray[np.float32]:
    return np.asarray(picture(number), np.float32).transpose(2, 0, 1) / np.float32(255)


def test_classes_and_files_come_by_name(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", COUNTS)
    prepared = prepare_data(recipe_of(folder), SHAPE)
    assert "3 classes: cat = 0, dog = 1, owl = 2" in prepared.description[0]
    values = prepared.train.sets[0].open().read(np.arange(12), np.arange(12))
    assert values["labels"].tolist() == [0] * 5 + [1] * 4 + [2] * 3
    numbers = [*range(3, 8), *range(8, 12), *range(3)]  # the pictures were drawn in the order owl, cat, dog
    assert all((values["pixel_values"][at] == pixels(number)).all() for at, number in enumerate(numbers))


def test_the_order_of_the_disk_says_nothing(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "one", COUNTS)
    other = tmp_path / "other"
    for name in ("owl", "dog", "cat"):
        (other / name).mkdir(parents=True)
        for file in sorted((folder / name).iterdir(), reverse=True):
            shutil.copy(file, other / name)
    shapes = DataShape(task="fields", fields=NAMED)
    ours, theirs = prepare_data(recipe_of(folder), shapes), prepare_data(recipe_of(other), shapes)
    assert ours.fingerprint == theirs.fingerprint
    (other / "cat" / "new.png").write_bytes((other / "cat" / os.listdir(other / "cat")[0]).read_bytes())
    assert prepare_data(recipe_of(other), shapes).fingerprint != ours.fingerprint


def test_every_image_once_with_its_class_whoever_reads(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", COUNTS)
    shape, plan = DataShape(task="fields", fields=NAMED), MicrobatchPlan(size=2)
    prepared = prepare_data(recipe_of(folder, size=4), shape)
    whole = open_data(recipe_of(folder, size=4), shape, microbatch=MicrobatchPlan(size=4), prepared=prepared)
    halves = [
        open_data(recipe_of(folder, size=4), shape, microbatch=plan, data_ranks=2, data_index=at, prepared=prepared)
        for at in (0, 1)
    ]
    labels: list[int] = []
    for step in range(3):
        (batch,) = whole.microbatches(step)
        parts = [half.microbatches(step)[0] for half in halves]
        for name in ("pixel_values", "labels", "sample_ids"):
            joined = np.concatenate([part[name].numpy() for part in parts])
            assert (joined == batch[name].numpy()).all()
        labels += batch["labels"].tolist()
    assert sorted(labels) == [0] * 5 + [1] * 4 + [2] * 3
    for source in (whole, *halves):
        source.close()


def test_pixels_and_labels_of_a_row(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", {"a": 2, "b": 1})
    prepared = prepare_data(recipe_of(folder), SHAPE)
    values = prepared.train.sets[0].open().read(np.array([2]), np.array([0]))
    assert (values["pixel_values"][0] == pixels(2)).all()
    assert values["labels"].tolist() == [1]
    assert "3 samples" in prepared.description[0]
    assert "2 classes: a = 0, b = 1" in prepared.description[0]


def test_the_model_numbers_classes_that_it_names(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", {"cat": 1, "owl": 1})
    shape = DataShape(task="fields", fields=NAMED, classes={"owl": 0, "cat": 2, "dog": 1})
    prepared = prepare_data(recipe_of(folder), shape)
    assert "2 classes: owl = 0, cat = 2" in prepared.description[0]
    (spec,) = prepared.train.sets
    assert spec.open().read(np.arange(2), np.arange(2))["labels"].tolist() == [2, 0]
    (folder / "cats").mkdir()
    picture(1).save(folder / "cats" / "1.png")
    with pytest.raises(DataError, match="a class cats, which the model's label2id does not have. Did you mean cat?"):
        prepare_data(recipe_of(folder), shape)


def test_a_class_that_only_validation_has(tmp_path: Path) -> None:
    train = write_images(tmp_path / "train", {"cat": 1, "owl": 2})
    other = write_images(tmp_path / "other", {"cat": 1, "eel": 1})
    shape = DataShape(task="fields", fields=NAMED)
    with pytest.raises(DataError, match="class eel, which the data for training does not have"):
        prepare_data(recipe_of(train, validation=(DataSource(source=str(other)),)), shape)


def test_more_classes_than_the_model_has(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", dict.fromkeys("abcd", 1))
    with pytest.raises(DataError, match=r"4 classes \(a, b, c, d\), but the model has 3. Set num_classes"):
        prepare_data(recipe_of(folder), DataShape(task="fields", fields=NAMED))


def test_a_folder_within_a_class_and_hidden_files(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", {"a": 1, "b": 1})
    (folder / "a" / "more").mkdir()
    picture(9).save(folder / "a" / "more" / "x.JPG", "JPEG")
    (folder / "a" / ".DS_Store").write_text("x")
    (folder / ".git").mkdir()
    prepared = prepare_data(recipe_of(folder), DataShape(task="fields", fields=NAMED))
    assert "3 samples" in prepared.description[0]
    assert "2 hidden files left out" in prepared.description[0]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("list.csv", "list.csv stands beside the folders of classes"),
        ("a/notes.txt", "a/notes.txt is no image and no sound, by its name"),
    ],
)
def test_what_is_no_image_is_not_left_out(tmp_path: Path, file: str, message: str) -> None:
    folder = write_images(tmp_path / "images", {"a": 1})
    (folder / file).write_text("x")
    with pytest.raises(DataError, match=message):
        prepare_data(recipe_of(folder), SHAPE)


def test_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="is empty: there is no folder of images"):
        prepare_data(recipe_of(tmp_path / "none"), SHAPE)
    (tmp_path / "none" / "cat").mkdir()
    with pytest.raises(DataError, match="none/cat, a folder of a class, has no images"):
        prepare_data(recipe_of(tmp_path / "none"), SHAPE)


def test_links_that_go_round(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", {"a": 1})
    (folder / "a" / "again").symlink_to(folder)
    with pytest.raises(DataError, match="links to a folder"):
        prepare_data(recipe_of(folder), SHAPE)


@pytest.mark.parametrize("seed", range(6))
def test_a_broken_image_is_named(tmp_path: Path, seed: int) -> None:
    """Files cut anywhere, or with wrong bytes in their middle, are read or refused by name: never a traceback."""
    folder = write_images(tmp_path / "images", {"a": 1})
    file = folder / "a" / "000.png"
    content, draws = bytearray(file.read_bytes()), np.random.default_rng(seed)
    if seed % 2:
        content = content[: int(draws.integers(0, len(content) - 20))]
    else:
        at = int(draws.integers(0, len(content) - 30))
        content[at : at + 20] = draws.bytes(20)
    file.write_bytes(content)
    said = ""
    try:
        spec = prepare_data(recipe_of(folder), SHAPE).train.sets[0]
        assert spec.open().read(np.array([0]), np.array([0]))["pixel_values"].shape == (1, 3, 8, 8)
    except DataError as problem:
        said = str(problem)
    assert not said or ("000.png" in said and "it is no image that can be read" in said)


def test_pixels_that_eight_bits_would_cut(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", {"a": 1})
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 900).save(folder / "a" / "000.png")
    with pytest.raises(DataError, match="more than 8 bits"):
        prepare_data(recipe_of(folder), DataShape(task="fields", fields=NAMED))


def test_images_as_numbers_for_regression_are_refused(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", {"a": 1, "b": 1})
    named = NAMED | {"labels": SampleField((1,), "float32")}
    with pytest.raises(DataError, match="has classes .*but the model takes numbers as labels"):
        prepare_data(recipe_of(folder), DataShape(task="fields", fields=named))
