"""A folder's tokenizer, image processor and feature extractor, from the command line on one and on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_kit import WEFT, watch
from model_folders import (
    WORDS,
    save_classifier,
    save_listener,
    save_translator,
    save_vision,
    write_rows,
    write_wave,
)
from PIL import Image

RECIPE = """
[model]
hf = "model"
{length}
[data]
train = [{{ source = "{source}" }}]
validation_fraction = 0.3
{columns}
[batch]
global_batch_size = 8
[optimizer]
learning_rate = 1e-2
[run]
steps = 4
evaluate_every = 2
save_every = 2
log_every = 1
"""


def of_images(home: Path, draws: np.random.Generator) -> str:
    save_vision(home / "model", num_labels=2)
    for number in range(24):
        name, low = (("dark", 0), ("light", 100))[number % 2]
        (home / "images" / name).mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(low, low + 150, (20, 18, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(home / "images" / name / f"{number:02}.png")
    return RECIPE.format(length="", source="images", columns="")


def of_texts(home: Path, draws: np.random.Generator) -> str:
    save_classifier(home / "model", types=True, num_labels=2)
    texts = [" ".join(draws.choice(WORDS, int(draws.integers(1, 9)))) for _ in range(24)]
    rows = [{"text": text, "label": "bad" if "bad" in text.split() else "good"} for text in texts]
    write_rows(home / "train.jsonl", [*rows, {"text": "bad", "label": "bad"}])
    return RECIPE.format(length="sequence_length = 8", source="train.jsonl", columns="")


def of_translations(home: Path, draws: np.random.Generator) -> str:
    save_translator(home / "model")
    numbers = [draws.integers(0, 3, int(draws.integers(1, 5))) for _ in range(24)]
    rows = [{"en": _spoken(one, 4), "es": _spoken(one, 7)} for one in numbers]
    write_rows(home / "train.jsonl", rows)
    columns = 'columns = { text = "en", target = "es" }'
    return RECIPE.format(length="sequence_length = 8", source="train.jsonl", columns=columns)


def _spoken(numbers: np.ndarray[Any, Any], first: int) -> str:
    return " ".join(WORDS[first + int(number)] for number in numbers)


def of_sounds(home: Path, draws: np.random.Generator) -> str:
    save_listener(home / "model", num_labels=2)
    rows: list[dict[str, Any]] = []
    for number in range(24):
        count, pitch = int(draws.integers(400, 600)), (200, 900)[number % 2]
        heights = 0.5 * np.sin(2 * np.pi * pitch * np.arange(count) / 8000) + draws.normal(0, 0.02, count)
        write_wave(home / f"{number}.wav", heights)
        rows.append({"audio": f"{number}.wav", "label": ("low", "high")[number % 2]})
    write_rows(home / "train.jsonl", rows)
    return RECIPE.format(length="sequence_length = 600", source="train.jsonl", columns="")


CASES: dict[str, tuple[Callable[[Path, np.random.Generator], str], str]] = {
    "images": (of_images, "pixel_values by ViTImageProcessor"),
    "texts": (of_texts, "input_ids by "),
    "translations": (of_translations, "input_ids and labels by "),
    "sounds": (of_sounds, "input_values by Wav2Vec2FeatureExtractor"),
}


def numbers_of(run: Path) -> list[tuple[str, int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = ("loss", "validation_loss")
    return [(kind, line["step"], line[kind]) for line in lines for kind in kinds if line.get(kind) is not None]


def weft(home: Path, *arguments: str) -> str:
    done = watch((WEFT, *arguments), home)
    assert done.status == 0, done.text
    return done.text


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_as_one(name: str, tmp_path: Path) -> None:
    write, words = CASES[name]
    (tmp_path / "recipe.toml").write_text(write(tmp_path, np.random.default_rng(7)))
    said = weft(tmp_path, "train", "recipe.toml", "--run-folder", "one", "--processes", "1")
    assert words in said
    weft(tmp_path, "train", "recipe.toml", "--run-folder", "two", "--processes", "2")
    one, two = numbers_of(tmp_path / "one"), numbers_of(tmp_path / "two")
    assert len(one) == 6
    assert [(kind, step) for kind, step, _ in one] == [(kind, step) for kind, step, _ in two]
    file = "tokenizer_config.json" if name in ("texts", "translations") else "preprocessor_config.json"
    assert (tmp_path / "two" / "export" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()
    assert [value for *_, value in two] == pytest.approx([value for *_, value in one], rel=2e-5)
    if name != "texts":
        return
    half = ("--processes", "2", "--set", "recipe.run.steps=2")
    weft(tmp_path, "train", "recipe.toml", "--run-folder", "half", *half)
    weft(tmp_path, "train", "recipe.toml", "--resume", "half", "--processes", "2")
    assert numbers_of(tmp_path / "half")[-3:] == two[-3:]


@pytest.mark.parametrize("name", ["texts", "translations"])
def test_masks_under_a_check(name: str, tmp_path: Path) -> None:
    """Plans that split the model compute what one process does, with the masks of samples that are filled up."""
    write, _ = CASES[name]
    (tmp_path / "recipe.toml").write_text(write(tmp_path, np.random.default_rng(7)))
    (tmp_path / "plan.toml").write_text("[mesh]\npipeline = 2\n[microbatch]\nsize = 2\nper_step = 4\n")
    assert "attention_mask" in weft(tmp_path, "describe", "recipe.toml")
    weft(tmp_path, "check", "recipe.toml", "--plan", "plan.toml")
