"""Draw families of every kind by a seed, and give each a small configuration with which it runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig

from benchmarks.families._kinds import Family, families_of
from benchmarks.families._samples import samples_of
from benchmarks.families._small import SIZES, small_settings
from weft.model.seeding import seeded

COUNTS: Mapping[str, int] = {
    "decoder": 15,
    "mixture": 5,
    "encoder": 5,
    "encoder-decoder": 5,
    "vision": 5,
    "audio": 3,
    "image-text": 3,
    "recurrent": 2,
}
OWN = ("mlp", "rnn", "towers", "convnet")
"""Modules of plain torch (`_own.py`)."""
CLASSES = 10
_MOST_PARAMETERS = 4_000_000


@dataclass(frozen=True, slots=True)
class Drawn:
    """A family that runs in a small form."""

    name: str
    """Its `model_type`, or the name of an own module."""
    kind: str
    auto: str
    """Class of `transformers` that constructs it; empty for own modules."""
    architecture: str
    parameters: int


@dataclass(frozen=True, slots=True)
class Redrawn:
    """A family that was drawn, and has no small form that runs."""

    name: str
    kind: str
    why: str


def draw(seed: int, folder: Path, counts: Mapping[str, int] = COUNTS) -> tuple[list[Drawn], list[Redrawn]]:
    """Draw `counts` families of each kind, and write `<folder>/<family>/config.json`; no family comes twice."""
    drawn: list[Drawn] = []
    redrawn: list[Redrawn] = []
    for kind, count in counts.items():
        families = families_of(kind)
        random.Random(f"{seed} {kind}").shuffle(families)
        missing = count
        for family in families:
            if not missing:
                break
            if any(family.model_type == other.name for other in drawn):
                continue
            try:
                drawn.append(_small_form(family, kind, folder))
                missing -= 1
            except Exception as problem:  # a library's constructor or forward may raise what it likes
                redrawn.append(Redrawn(family.model_type, kind, _first_line(problem)))
    return drawn, redrawn


def _small_form(family: Family, kind: str, folder: Path) -> Drawn:
    usual = AutoConfig.for_model(family.model_type).to_dict()
    first: Exception | None = None
    for size in SIZES:
        try:
            config = AutoConfig.for_model(family.model_type, **small_settings(usual, size), **_labels(family))
            config.use_cache = False
            model = construct(config, family.auto)
            samples_of(model, family.auto)
        except Exception as problem:
            first = first or problem
            continue
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if parameters > _MOST_PARAMETERS:
            raise ValueError(f"its small form has {parameters:,} parameters")
        path = folder / family.model_type
        path.mkdir(parents=True, exist_ok=True)
        config.architectures = [type(model).__name__]
        (path / "config.json").write_text(config.to_json_string(use_diff=False))
        return Drawn(family.model_type, kind, family.auto, type(model).__name__, parameters)
    assert first is not None
    raise first


def _labels(family: Family) -> dict[str, Any]:
    return {"num_labels": CLASSES} if "Classification" in family.auto and "ZeroShot" not in family.auto else {}


def construct(config: Any, auto: str, seed: int = 0) -> nn.Module:
    """A model with random weights, as training begins."""
    with seeded(seed):
        return getattr(transformers, auto).from_config(config).train()


def own_modules() -> list[Drawn]:
    """The modules of plain torch."""
    return [Drawn(name, "own", "", name, 0) for name in OWN]


def as_json(drawn: list[Drawn], redrawn: list[Redrawn]) -> dict[str, Any]:
    """What a result keeps of the draw."""
    return {"drawn": [asdict(one) for one in drawn], "redrawn": [asdict(one) for one in redrawn]}


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {' '.join(lines[:2])}"[:200]
