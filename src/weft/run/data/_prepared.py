"""Prepared data, as ranks open them: plain values that travel as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

from weft.config.document import plain, typed
from weft.run.data._reader import TrainSpec
from weft.run.data._samples import SampleSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """Everything that a rank needs to open the data, as plain values that travel as JSON."""

    train: TrainSpec
    validation: tuple[SampleSpec, ...]
    tokenizer: str | None
    """Path of the tokenizer; None: there is no text."""
    description: tuple[str, ...]
    """One line per source, for the start of a run: `stdlib: 31.5 MB, 1,786 files, 8.8 M tokens`."""
    fingerprint: str
    branches: tuple[str, ...] = ()
    """Blocks of the model that only some of the first samples run, as looks at these have shown."""

    def to_json(self) -> str:
        return json.dumps(plain(self))

    @staticmethod
    def from_json(text: str) -> PreparedData:
        return typed(PreparedData, json.loads(text))
