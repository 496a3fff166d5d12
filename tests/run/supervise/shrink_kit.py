"""A small training in which a rank fails, on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import weft
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    ModelRecipe,
    OnFailure,
    OptimizerRecipe,
    Recipe,
    RunRecipe,
)
from weft.run.launch.launcher import ForkServer

STEPS = 12


def write_corpus(folder: Path) -> Path:
    for number in range(6):
        lines = (f"text {number} says {line * number % 97}\n" for line in range(200))
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


def recipe_of(corpus: Path, folder: Path, *, fault: dict[str, Any] | None = None, batch: int = 6, **run: Any) -> Recipe:
    """`run`: settings of `[run]`."""
    settings: dict[str, Any] = {"steps": STEPS, "save_every": 3, "on_failure": OnFailure(), **run}
    arguments = {**fault, "mark": str(folder / "mark")} if fault else {}
    return Recipe(
        model=ModelRecipe(
            factory="faulty_models:build",
            arguments=arguments,
            sequence_length=16,
            loss="tokens",
            propose_split=False,
        ),
        data=DataRecipe(
            train=(DataSource(source=str(corpus)),), cache=str(corpus.parent / "cache"), validation_fraction=0.2
        ),
        batch=BatchRecipe(global_batch_size=batch),
        optimizer=OptimizerRecipe(learning_rate=1e-2),
        run=RunRecipe(**settings),
    )


def train(recipe: Recipe, folder: Path, fork_server: ForkServer, plan: weft.Plan) -> weft.RunResult:
    return weft.train(recipe, plan, folder=folder / "run", fork_server=fork_server, prove="never", quiet=True)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def near(losses: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether losses are those of another plan: equal but for rounding in fp32."""
    return len(losses) == len(expected) and all(
        abs(loss - other) <= 2e-5 * abs(other) for loss, other in zip(losses, expected, strict=True)
    )
