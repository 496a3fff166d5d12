"""Sets of images or vectors, in numpy: digits, and made up around a pattern."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError
from weft.model.families import SampleField
from weft.run.data._fields import SYNTHETIC_KEY, Fields, Split, check_finite
from weft.run.data._keyed import Permutation, normal, uniform

_DIGITS_VALIDATION = 297


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

    def __init__(
        self,
        shape: tuple[int, ...],
        num_classes: int | None,
        label_shape: tuple[int, ...],
        *,
        num_samples: int,
        split: Split,
    ) -> None:
        self._shape, self._num_classes, self._label_shape = shape, num_classes, label_shape
        self._num_samples = num_samples
        self._key = 2 * SYNTHETIC_KEY + (split == "validation")
        self._elements = np.arange(int(np.prod(shape)), dtype=np.int64)
        self._outputs = np.arange(int(np.prod(label_shape)), dtype=np.int64)

    @property
    def size(self) -> int:
        return self._num_samples

    @property
    def fields(self) -> Mapping[str, SampleField]:
        if self._num_classes is not None:
            return {"images": SampleField(self._shape, "float32"), "labels": SampleField((), "int64")}
        label = SampleField(self._label_shape, "float32")
        return {
            "images": SampleField(self._shape, "float32"),
            "labels": label,
            "weights": SampleField((), "float32"),
        }

    def read(self, index: NDArray[np.int64], ids: NDArray[np.int64]) -> Fields:
        noise = normal(self._key, index[:, None], self._elements)
        shape = (len(index), *self._shape)
        if self._num_classes is not None:
            labels = (uniform(self._key, index) * self._num_classes).astype(np.int64)
            pattern = normal(SYNTHETIC_KEY, labels[:, None], self._elements)
            return {"images": (pattern + noise).astype(np.float32).reshape(shape), "labels": labels}
        weights = normal(SYNTHETIC_KEY, self._elements[:, None], self._outputs) / np.sqrt(len(self._elements))
        labels = (noise @ weights).astype(np.float32).reshape(len(index), *self._label_shape)
        ones = np.ones(len(index), np.float32)
        return {"images": noise.astype(np.float32).reshape(shape), "labels": labels, "weights": ones}


def digits(split: str, shape: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """scikit-learn's 1,797 handwritten digits, scaled to [0, 1]; the same 297 are always for validation."""
    values, labels = _read_digits()
    images = (values / 16.0).astype(np.float32).reshape(-1, *shape)
    order = Permutation(len(images), SYNTHETIC_KEY)(np.arange(len(images)))
    chosen = np.sort(order[:_DIGITS_VALIDATION] if split == "validation" else order[_DIGITS_VALIDATION:])
    return images[chosen], labels[chosen].astype(np.int64)


def _read_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the values (1797, 64), 0 to 16, and the labels."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("The source digits needs scikit-learn. Install it: pip install 'weft[images]'.")
    table = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if table.is_file():
        # Every rank and helper reads this: the table takes 0.1 s, importing scikit-learn and scipy for it takes 1 s.
        rows = np.loadtxt(table, delimiter=",")
        return rows[:, :-1], rows[:, -1].astype(np.int64)
    datasets: Any = importlib.import_module("sklearn.datasets")
    digits = datasets.load_digits()
    return digits.data, digits.target
