"""Data sets on disk as `datasets` 5.2 saves them, written by pyarrow: the library itself is no dependency."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from PIL import Image

from weft.config.recipe import BatchRecipe, DataRecipe, DataSource, ModelRecipe, Recipe, RunRecipe

_KINDS = {"string": "string", "int64": "int64"}


def save_dataset(
    folder: Path,
    columns: Mapping[str, Sequence[Any]],
    features: Mapping[str, Mapping[str, Any]],
    *,
    cuts: Sequence[int] = (),
    indices: Sequence[int] | None = None,
) -> Path:
    """Write a data set, in one file or cut before these rows into several; with `indices`, as older releases did."""
    folder.mkdir(parents=True)
    table = arrow.table({name: list(values) for name, values in columns.items()})
    edges = [0, *cuts, table.num_rows]
    files = [f"data-{at:05}-of-{len(edges) - 1:05}.arrow" for at in range(len(edges) - 1)]
    for file, start, stop in zip(files, edges, edges[1:], strict=False):
        _write(folder / file, table.slice(start, stop - start))
    state: dict[str, Any] = {"_data_files": [{"filename": file} for file in files], "_split": None}
    if indices is not None:
        _write(folder / "indices.arrow", arrow.table({"indices": arrow.array(indices, arrow.uint64())}))
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def save_splits(folder: Path, names: Sequence[str]) -> Path:
    """Make a folder of data sets a `DatasetDict`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(names)}))
    return folder


def _write(file: Path, table: Any) -> None:
    with arrow.OSFile(str(file), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def value(kind: str) -> dict[str, Any]:
    return {"dtype": _KINDS[kind], "_type": "Value"}


def classes(*names: str) -> dict[str, Any]:
    return {"names": list(names), "_type": "ClassLabel"}


IMAGE = {"_type": "Image"}


def picture(number: int, side: int = 8, channels: int = 3) -> Any:
    """An image of Pillow, another for every number."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, channels), dtype=np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)


def packed(image: Any) -> dict[str, Any]:
    """An image as `datasets` keeps it: a file's bytes, and where it came from."""
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def write_images(folder: Path, counts: Mapping[str, int], *, channels: int = 3) -> Path:
    """A folder of images with a folder per class; every image is another one."""
    number = 0
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for _ in range(count):
            picture(number, channels=channels).save(folder / name / f"{number:03}.png")
            number += 1
    return folder


def recipe_of(train: Path | str, *, size: int = 2, model: ModelRecipe | None = None, **data: Any) -> Recipe:
    """A recipe of one source, of which nothing is held out unless `data` says so."""
    settings = {"train": (DataSource(source=str(train)),), "validation_fraction": 0.0, **data}
    return Recipe(
        model=ModelRecipe(factory="nothing:builds_it") if model is None else model,
        data=DataRecipe(**settings),
        batch=BatchRecipe(global_batch_size=size),
        run=RunRecipe(steps=1),
    )
