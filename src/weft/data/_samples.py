"""Sets of samples: index → fields, in numpy.  Which index a step needs is the sampler's business."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data._fields import Fields, Split, check_finite
from weft.data._keyed import Permutation, normal, uniform
from weft.data._tokens import StreamWindows, SyntheticWindows, TokenSamples, TokenTask
from weft.errors import DataError
from weft.families import SampleField

SYNTHETIC_SAMPLES = 65_536
SYNTHETIC_VALIDATION = 129
"""Samples of a synthetic validation set: an odd number, so that evaluation meets an uneven tail."""
_SYNTHETIC_KEY = 0x5EED
_DIGITS_VALIDATION = 297


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
    """How to open a set of token samples, in any process."""

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
            key = 2 * _SYNTHETIC_KEY + whole
            windows = SyntheticWindows(self.num_samples, self.task.window, self.task.vocabulary_size, key)
        else:
            from weft.data._corpus import open_corpus  # synthetic tokens and images have none

            corpus = open_corpus(self.folder, verify=False)
            windows = StreamWindows(corpus.stream(self.split, self.validation_fraction), self.task, keep_tail=whole)
        return TokenSamples(windows, self.task, self.folder or "synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """How to open a set of images or vectors."""

    source: Literal["digits", "synthetic"]
    split: Literal["train", "validation"]
    shape: tuple[int, ...]
    num_classes: int | None
    """None: regression."""
    label_shape: tuple[int, ...] = ()
    num_samples: int = 0
    """Synthetic only."""

    def open(self) -> SampleSet:
        if self.source == "digits":
            return ImageSamples(*_digits(self.split, self.shape), regression=False)
        return SyntheticImages(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """How to open a set of samples with named fields."""

    file: str | None
    """A file, or a folder of files, of samples; None: they are made up."""
    split: Split
    validation_fraction: float
    named: Mapping[str, SampleField]
    num_samples: int = 0
    """Made up only."""
    digest: str = ""
    """Hash of the files."""

    def open(self) -> SampleSet:
        from weft.data._named import FileFields, SyntheticFields  # text and sets of images do without

        if self.file is None:
            return SyntheticFields(self.named, self.num_samples, self.split)
        return FileFields(Path(self.file), self.named, self.split, self.validation_fraction)


SampleSpec = TokenSpec | ImageSpec | FieldSpec


class ImageSamples:
    """Images and labels held in memory."""

    def __init__(self, images: NDArray[np.float32], labels: NDArray[Any], *, regression: bool) -> None:
        check_finite("images", images, np.arange(len(images)))
        self._values: Fields = {"images": images, "labels": labels}
        if regression:
            check_finite("labels", labels, np.arange(len(labels)))
            self._values["weights"] = np.ones(len(images), np.float32)

    @property
    def size(self) -> int:
        return len(self._values["images"])

    @property
    def fields(self) -> Mapping[str, SampleField]:
        floats = {name: values.dtype.kind == "f" for name, values in self._values.items()}
        return {
            name: SampleField(values.shape[1:], "float32" if floats[name] else "int64")
            for name, values in self._values.items()
        }

    def read(self, index: NDArray[np.int64], ids: NDArray[np.int64]) -> Fields:
        return {name: values[index] for name, values in self._values.items()}


class SyntheticImages:
    """Noise around one pattern per class, or with a linear target for regression; a pure function of the index."""

    def __init__(self, spec: ImageSpec) -> None:
        self._spec = spec
        self._key = 2 * _SYNTHETIC_KEY + (spec.split == "validation")
        self._elements = np.arange(int(np.prod(spec.shape)), dtype=np.int64)
        self._outputs = np.arange(int(np.prod(spec.label_shape)), dtype=np.int64)

    @property
    def size(self) -> int:
        return self._spec.num_samples

    @property
    def fields(self) -> Mapping[str, SampleField]:
        if self._spec.num_classes is not None:
            return {"images": SampleField(self._spec.shape, "float32"), "labels": SampleField((), "int64")}
        label = SampleField(self._spec.label_shape, "float32")
        return {
            "images": SampleField(self._spec.shape, "float32"),
            "labels": label,
            "weights": SampleField((), "float32"),
        }

    def read(self, index: NDArray[np.int64], ids: NDArray[np.int64]) -> Fields:
        noise = normal(self._key, index[:, None], self._elements)
        shape = (len(index), *self._spec.shape)
        if self._spec.num_classes is not None:
            labels = (uniform(self._key, index) * self._spec.num_classes).astype(np.int64)
            pattern = normal(_SYNTHETIC_KEY, labels[:, None], self._elements)
            return {"images": (pattern + noise).astype(np.float32).reshape(shape), "labels": labels}
        weights = normal(_SYNTHETIC_KEY, self._elements[:, None], self._outputs) / np.sqrt(len(self._elements))
        labels = (noise @ weights).astype(np.float32).reshape(len(index), *self._spec.label_shape)
        ones = np.ones(len(index), np.float32)
        return {"images": noise.astype(np.float32).reshape(shape), "labels": labels, "weights": ones}


def _digits(split: str, shape: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """scikit-learn's 1,797 handwritten digits, scaled to [0, 1]; the same 297 are always for validation."""
    values, labels = _read_digits()
    images = (values / 16.0).astype(np.float32).reshape(-1, *shape)
    order = Permutation(len(images), _SYNTHETIC_KEY)(np.arange(len(images)))
    chosen = np.sort(order[:_DIGITS_VALIDATION] if split == "validation" else order[_DIGITS_VALIDATION:])
    return images[chosen], labels[chosen].astype(np.int64)


def _read_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the values (1797, 64), 0 to 16, and the labels."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError("The source digits needs scikit-learn. Install it: pip install 'weft[images]'.")
    table = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if table.is_file():
        # Every rank and helper reads this: the table takes 0.1 s, importing scikit-learn and scipy for it takes 1 s.
        rows = np.loadtxt(table, delimiter=",")
        return rows[:, :-1], rows[:, -1].astype(np.int64)
    datasets: Any = importlib.import_module("sklearn.datasets")
    digits = datasets.load_digits()
    return digits.data, digits.target
