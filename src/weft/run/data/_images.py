"""Image sources for a model's shape."""

from __future__ import annotations

import math
from typing import Literal

from weft.errors import DataError
from weft.run.data._samples import SYNTHETIC_SAMPLES, SYNTHETIC_VALIDATION, ImageSpec
from weft.run.data._shape import DataShape

_DIGITS_SHAPE = (1, 8, 8)
_DIGITS_CLASSES = 10


def image_specs(source: str, shape: DataShape) -> tuple[ImageSpec, ImageSpec]:
    """Return the training and the validation set of an image source.

    Digits have a fixed split of 1,500 and 297 (`validation_fraction` only says whether there is one).

    Raises:
        DataError: The source's images do not fit the model.
    """
    kind: Literal["digits", "synthetic"] = "digits" if source == "digits" else "synthetic"
    image_shape = shape.image_shape or _DIGITS_SHAPE
    classes = None if shape.task == "regression" else shape.num_classes
    if kind == "digits":
        _check_digits(image_shape, classes)
    label = shape.label_shape if classes is None else ()

    def make(split: Literal["train", "validation"], num_samples: int) -> ImageSpec:
        return ImageSpec(
            source=kind,
            split=split,
            shape=image_shape,
            num_classes=classes,
            label_shape=label,
            num_samples=num_samples if kind == "synthetic" else 0,
        )

    return make("train", SYNTHETIC_SAMPLES), make("validation", SYNTHETIC_VALIDATION)


def _check_digits(image_shape: tuple[int, ...], classes: int | None) -> None:
    if math.prod(image_shape) != math.prod(_DIGITS_SHAPE) or image_shape not in ((1, 8, 8), (8, 8), (64,)):
        raise DataError(
            f"The source digits has images of 1 × 8 × 8 (64 values), but the model takes {image_shape}. Set "
            f"image_size = 8 and image_channels = 1 (input_size = 64 for an mlp), or use synthetic."
        )
    if classes is None:
        raise DataError("The source digits has classes, but the model does regression. Use synthetic.")
    if classes < _DIGITS_CLASSES:
        raise DataError(
            f"The source digits has {_DIGITS_CLASSES} classes, but the model has num_classes = {classes}. "
            f"Set model.num_classes = {_DIGITS_CLASSES}."
        )
