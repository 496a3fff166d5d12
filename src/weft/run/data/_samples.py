"""Sets of samples: index → fields, in numpy.  Which index a step needs is the sampler's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.model.families import SampleField
from weft.run.data._fields import SYNTHETIC_KEY, Fields, Split
from weft.run.data._tokens import StreamWindows, SyntheticWindows, TokenSamples, TokenTask

if TYPE_CHECKING:
    from weft.run.data._processors import FolderProcessors
    from weft.run.data._rows import SourceRows

SYNTHETIC_SAMPLES = 65_536
SYNTHETIC_VALIDATION = 129
"""Samples of a synthetic validation set: an odd number, so that evaluation meets an uneven tail."""


class SampleSet(Protocol):
    """A finite set of samples."""

    @property
    def size(self) -> int: ...

    @property
    def fields(self) -> Mapping[str, SampleField]: ...

    def read(self, index: NDArray[np.int64], ids: NDArray[np.int64]) -> Fields:
        """Return the samples at `index`, stacked along dim 0; `ids` key what is random about them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpec:
    """A set of token samples that any process can open."""

    folder: str | None
    """Folder of the prepared corpus; None: synthetic."""
    fingerprint: str
    split: Split
    validation_fraction: float
    task: TokenTask
    num_samples: int = 0
    """Synthetic only."""

    def open(self) -> SampleSet:
        whole = self.split == "validation"
        if self.folder is None:
            key = 2 * SYNTHETIC_KEY + whole
            windows = SyntheticWindows(self.num_samples, self.task.window, self.task.vocabulary_size, key)
        else:
            from weft.run.data._corpus import open_corpus  # synthetic tokens and images have none

            corpus = open_corpus(self.folder, verify=False)
            windows = StreamWindows(corpus.stream(self.split, self.validation_fraction), self.task, keep_tail=whole)
        return TokenSamples(windows, self.task, self.folder or "synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """A set of images or vectors that any process can open."""

    source: Literal["digits", "synthetic"]
    split: Literal["train", "validation"]
    shape: tuple[int, ...]
    num_classes: int | None
    """None: regression."""
    label_shape: tuple[int, ...] = ()
    num_samples: int = 0
    """Synthetic only."""

    def open(self) -> SampleSet:
        from weft.run.data._image_samples import ImageSamples, SyntheticImages, digits  # text does without

        if self.source == "digits":
            return ImageSamples(*digits(self.split, self.shape), regression=False)
        return SyntheticImages(
            self.shape, self.num_classes, self.label_shape, num_samples=self.num_samples, split=self.split
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """A set of samples with named fields that any process can open."""

    file: str | None
    """A file or folder that has samples; None: they are made up."""
    split: Split
    validation_fraction: float
    named: Mapping[str, SampleField]
    num_samples: int = 0
    """Number of samples of a synthetic set; 0 if the set has a file."""
    digest: str = ""
    """Hash of the files."""
    classes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Name of a class → its number; empty: nobody names them."""
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of a field → the column of the row that has it."""
    processors: str | None = None
    """Folder of the model whose tokenizer and processors make fields; None: it has none."""
    processors_digest: str = ""
    """Hash of the processors' files and settings."""

    def open(self, rows: SourceRows | None = None) -> SampleSet:
        """Open the set; `rows`: what lies at `file`, where it is open already."""
        from weft.run.data._named import FileFields, SyntheticFields  # text and sets of images do without

        if self.file is None:
            return SyntheticFields(self.named, self.num_samples, self.split)
        return FileFields(
            Path(self.file),
            self.named,
            self.split,
            self.validation_fraction,
            classes=self.classes,
            columns=self.columns,
            processors=self._processors(),
            rows=rows,
        )

    def _processors(self) -> FolderProcessors | None:
        if self.processors is None:
            return None
        from weft.run.data._processors import FolderProcessors

        return FolderProcessors(Path(self.processors), self.named, self.columns, self.classes)


SampleSpec = TokenSpec | ImageSpec | FieldSpec
