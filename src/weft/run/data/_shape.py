"""Shapes and fields of data that a model takes, read off its blueprint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from weft.config.recipe import ConvNetShape, MlpShape, Recipe
from weft.errors import DataError
from weft.model.families import SampleField

if TYPE_CHECKING:
    from torch import Tensor

    from weft.model.blueprint import Blueprint

_DEFAULT_CLASSES = 10
DataTask = Literal["causal_lm", "masked_lm", "classification", "regression", "fields"]
_OF_TEXT = {"tokens", "positions", "document_ids"}
"""Fields of a batch that corpora give."""
_COUNTED = re.compile(r"LABEL_\d+")
_UNKNOWN_VALUES = 10
"""Integers of which nobody says how large they may be are below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShape:
    """The samples that a model takes."""

    task: DataTask
    sequence_length: int | None = None
    """Tokens per sample, for language models."""
    vocabulary_size: int | None = None
    """Every token must be less; also the size of a tokenizer that is trained."""
    image_shape: tuple[int, ...] | None = None
    """Shape of one image or vector; None: as the source has it."""
    num_classes: int = _DEFAULT_CLASSES
    """Classes of samples that are made up."""
    is_num_classes_known: bool = True
    """Whether the model says so; a factory's does not."""
    label_shape: tuple[int, ...] = (1,)
    """Shape of one regression target."""
    fields: Mapping[str, SampleField] = field(default_factory=dict[str, SampleField])
    """A sample, field by field, of a model that takes neither tokens alone nor images alone; empty: of any other."""

    classes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Name of a class → its number, where the model names them."""

    processors: str | None = None
    """Folder of the model that has a tokenizer or processors; None: there is none."""

    @property
    def is_text(self) -> bool:
        return self.task in ("causal_lm", "masked_lm")


def data_shape(blueprint: Blueprint, recipe: Recipe) -> DataShape:
    """Return the shape of the samples that the recipe's model takes.

    Raises:
        DataError: A language model does not say its vocabulary or sequence length.
    """
    example = blueprint.example(1) if blueprint.example is not None else {}
    named = _named_fields(blueprint, example)
    if named:
        return DataShape(task="fields", fields=named, classes=_named_classes(blueprint), processors=_processors(recipe))
    if blueprint.task in ("causal_lm", "masked_lm") or "tokens" in blueprint.inputs.values():
        return _text_shape(blueprint, recipe, example)
    image = tuple(example["images"].shape[1:]) if "images" in example else None
    floats = "labels" in example and example["labels"].is_floating_point()
    if recipe.model.loss == "regression" or floats:
        label = tuple(example["labels"].shape[1:]) if floats else (1,)
        return DataShape(task="regression", image_shape=image, label_shape=label)
    shape = recipe.model.shape
    classes = shape.num_classes if isinstance(shape, MlpShape | ConvNetShape) else _DEFAULT_CLASSES
    return DataShape(task="classification", image_shape=image, num_classes=classes, classes=_named_classes(blueprint))


def _processors(recipe: Recipe) -> str | None:
    """The model's folder, where it has a tokenizer or processors."""
    if recipe.model.hf is None:
        return None
    from weft.config.recipe.hf_folder import read_hf_processors  # other models do without

    processors = read_hf_processors(recipe.model.hf)
    return None if processors.is_empty else str(processors.folder.resolve())


def _named_classes(blueprint: Blueprint) -> Mapping[str, int]:
    """`label2id` of the model's configuration; empty where it only counts (`LABEL_0`)."""
    labels = (blueprint.export_config or {}).get("label2id")
    if not isinstance(labels, Mapping) or all(_COUNTED.fullmatch(str(name)) for name in labels):
        return {}
    return {str(name): int(number) for name, number in labels.items()}


def _named_fields(blueprint: Blueprint, example: Mapping[str, Tensor]) -> Mapping[str, SampleField]:
    """Fields of a sample that neither corpora nor sets of images have; empty: they have what the model reads."""
    if blueprint.samples:
        return blueprint.samples
    read = set(blueprint.inputs.values())
    if read <= _OF_TEXT or read == {"images"}:
        return {}
    if not example:
        raise DataError(
            f"The model reads {', '.join(sorted(read))}, and nothing says what these look like. Give its Blueprint an "
            "`example`, or pass a loader to weft.session."
        )
    below = blueprint.vocabulary_size or _UNKNOWN_VALUES
    return {
        name: SampleField(tuple(like.shape[1:]), "float32")
        if like.is_floating_point()
        else SampleField(tuple(like.shape[1:]), "int64", below)
        for name, like in example.items()
        if name != "sample_ids"
    }


def _text_shape(blueprint: Blueprint, recipe: Recipe, example: dict[str, Tensor]) -> DataShape:
    length = int(example["tokens"].shape[1]) if "tokens" in example else recipe.model.sequence_length
    if length is None:
        raise DataError("Nothing says how many tokens make a sample. Set model.sequence_length.")
    if blueprint.vocabulary_size is None:
        raise DataError(
            "The model reads tokens, but its blueprint gives no vocabulary_size, so tokens could not be checked. "
            "Set vocabulary_size in the blueprint."
        )
    task: DataTask = "masked_lm" if blueprint.task == "masked_lm" else "causal_lm"
    return DataShape(
        task=task,
        sequence_length=length,
        vocabulary_size=blueprint.vocabulary_size,
        processors=_processors(recipe),
    )
