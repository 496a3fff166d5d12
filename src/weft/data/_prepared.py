"""What preparing leaves for ranks to open: plain values that travel as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from weft.data._reader import TrainSpec
from weft.data._samples import SampleSpec, spec_from_json, spec_to_json


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

    def to_json(self) -> str:
        return json.dumps(
            {
                "train": self.train.to_json(),
                "validation": [spec_to_json(spec) for spec in self.validation],
                "tokenizer": self.tokenizer,
                "description": self.description,
                "fingerprint": self.fingerprint,
            }
        )

    @staticmethod
    def from_json(text: str) -> PreparedData:
        fields: dict[str, Any] = json.loads(text)
        return PreparedData(
            train=TrainSpec.from_json(fields["train"]),
            validation=tuple(spec_from_json(spec) for spec in fields["validation"]),
            tokenizer=fields["tokenizer"],
            description=tuple(fields["description"]),
            fingerprint=fields["fingerprint"],
        )
