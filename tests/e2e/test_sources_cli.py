"""Images in a folder per class and data sets on disk, trained from the command line on one and on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_kit import WEFT, watch
from PIL import Image

arrow: Any = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed: `make setup` does")

RECIPE = """
[model]
reference = "convnet"
num_layers = 1
channels = 8
norm = "group"
num_classes = 2
image_size = 8
image_channels = 3
[data]
train = [{ source = "images" }]
validation_fraction = 0.3
[batch]
global_batch_size = 8
[optimizer]
name = "sgd"
learning_rate = 0.1
[run]
steps = 6
evaluate_every = 3
save_every = 3
log_every = 1
"""


def write_pictures(folder: Path, count: int = 24) -> None:
    """Dark and light noise, a folder each."""
    draws = np.random.default_rng(3)
    for number in range(count):
        name, low = (("dark", 0), ("light", 100))[number % 2]
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(low, low + 150, (10, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name / f"{number:02}.png")


def numbers(run: Path, *, kinds: tuple[str, ...] = ("loss", "validation_loss")) -> list[tuple[str, int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(kind, line["step"], line[kind]) for line in lines for kind in kinds if line.get(kind) is not None]


def train(home: Path, run: str, *arguments: str) -> str:
    folder = () if "--resume" in arguments else ("--run-folder", run)
    done = watch((WEFT, "train", "recipe.toml", *folder, *arguments), home)
    assert done.status == 0, done.text
    return done.text


def test_an_image_folder_on_two_ranks_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    write_pictures(tmp_path / "images")
    said = train(tmp_path, "one", "--processes", "1")
    assert "2 classes: dark = 0, light = 1" in said
    train(tmp_path, "two", "--processes", "2")
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert len(one) >= 8
    assert [(kind, step) for kind, step, _ in one] == [(kind, step) for kind, step, _ in two]
    assert [value for *_, value in two] == pytest.approx([value for *_, value in one], rel=1e-5)
    train(tmp_path, "half", "--processes", "2", "--set", "recipe.run.steps=3")
    train(tmp_path, "half", "--processes", "2", "--resume", "half")
    assert numbers(tmp_path / "half")[-4:] == two[-4:]
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "dark" / "new.png")
    other = watch((WEFT, "train", "recipe.toml", "--resume", "half", "--set", "recipe.run.steps=9"), tmp_path)
    assert other.status != 0
    assert "Traceback" not in other.text
    assert "the samples would not be the same" in other.text
