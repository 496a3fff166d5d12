"""Prepares the data of a recipe: once per host, before its ranks open them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from weft.config.document import format_value
from weft.config.recipe import DataRecipe, Recipe
from weft.errors import DataError
from weft.model.families import SampleField
from weft.run.data._corpus import PreparedCorpus, is_prepared, open_corpus
from weft.run.data._fields import Split
from weft.run.data._images import image_specs
from weft.run.data._prepare import check_vocabulary, prepare, shared_tokenizer
from weft.run.data._prepared import PreparedData
from weft.run.data._progress import Progress, silent
from weft.run.data._reader import TrainSpec
from weft.run.data._samples import SYNTHETIC_SAMPLES, SYNTHETIC_VALIDATION, ImageSpec, SampleSpec, TokenSpec
from weft.run.data._shape import DataShape
from weft.run.data._sources import check_source
from weft.run.data._tokens import TokenTask

_IMAGE_SOURCES = ("digits", "synthetic")


def prepare_data(
    recipe: Recipe, shape: DataShape, *, workers: int | None = None, progress: Progress = silent
) -> PreparedData:
    """Prepare all corpora of a recipe, or find them in the cache, and verify every byte.

    Call it once per host, before ranks start; several callers at once are safe, one works and the others wait.

    Raises:
        DataError: A source is missing, broken, empty, or of another kind than the model takes.
    """
    _check_used(recipe, shape)
    if shape.is_text:
        return _prepare_text(recipe, shape, workers, progress)
    if shape.fields:
        return _prepare_fields(recipe, shape)
    return _prepare_images(recipe, shape)


def _prepare_fields(recipe: Recipe, shape: DataShape) -> PreparedData:
    """Samples with named fields, made up or from files."""
    from weft.run.data._field_sources import FieldSources  # text and sets of images do without

    sources = FieldSources(recipe.data, shape.fields, shape.classes, shape.processors)
    return _prepared(recipe, sources.train, sources.validation, None, sources.description)


def describe_samples(shape: DataShape) -> list[str]:
    """Lines on what a sample has, field by field, and on what the model's folder makes of which column.

    Raises:
        DataError: transformers cannot load what the folder has.
    """
    if not shape.fields:
        return []
    from weft.run.data._named import describe_named

    lines = [f"One sample: {describe_named(shape.fields)}."]
    if shape.processors is not None:
        from weft.run.data._processors import FolderProcessors

        processors = FolderProcessors(Path(shape.processors), shape.fields)
        columns = ", ".join(processors.columns)
        lines += [f"By the model's folder: {', '.join(processors.words)}; of the columns {columns}."] if columns else []
    return lines


def _check_used(recipe: Recipe, shape: DataShape) -> None:
    """Refuse settings of `[data]` that this kind of model, or these sources, would ignore."""
    data, unset = recipe.data, DataRecipe()
    sources = [source.source for source in (*data.train, *data.validation)]
    has_text = shape.is_text and any(source != "synthetic" for source in sources)
    reader = "a masked language model" if shape.is_text else "text"
    wanted: tuple[tuple[str, bool, str], ...] = (
        ("mask_fraction", shape.task == "masked_lm", f"is for {reader}, and this one does {shape.task}"),
        ("tokenizer", has_text, "is for text, and no source has any"),
        ("documents", has_text, "is for text, and no source has any"),
        ("columns", has_text or not shape.is_text, "is for sources with columns, and all are made up"),
    )
    for name, is_used, problem in wanted:
        if not is_used and getattr(data, name) != getattr(unset, name):
            raise DataError(f"data.{name} = {format_value(getattr(data, name))} {problem}. Remove it.")


def _check_text_columns(data: DataRecipe) -> None:
    for name in data.columns:
        if name != "text":
            raise DataError(
                f"data.columns names {name}, but a language model reads text alone. Write data.columns ="
                f' {{ text = "{data.columns[name]}" }}, or remove it.'
            )


def _prepared(
    recipe: Recipe,
    train: Sequence[SampleSpec],
    validation: Sequence[SampleSpec],
    tokenizer: str | None,
    lines: Sequence[str],
) -> PreparedData:
    spec = TrainSpec(
        sets=tuple(train),
        weights=tuple(source.weight for source in recipe.data.train),
        seed=recipe.run.seed,
        global_batch_size=recipe.batch.global_batch_size,
    )
    return PreparedData(
        train=spec,
        validation=tuple(validation),
        tokenizer=tokenizer,
        description=tuple(lines),
        fingerprint=_fingerprint(train, spec.weights),
    )


def _fingerprint(train: Sequence[SampleSpec], weights: Sequence[float]) -> str:
    """Digest what decides the training samples: contents and settings, not where they lie."""
    known: list[dict[str, Any]] = [{"kind": type(spec).__name__, **asdict(spec)} for spec in train]
    for spec in known:
        spec.pop("folder", None)
        spec.pop("file", None)  # its digest stands beside it
        spec.pop("processors", None)  # and theirs
        # The seed has a place of its own in a checkpoint, and an error of its own.
        spec.get("task", {}).pop("seed", None)
    return xxhash.xxh3_128_hexdigest(json.dumps([known, list(weights)], sort_keys=True).encode())


def _prepare_text(recipe: Recipe, shape: DataShape, workers: int | None, progress: Progress) -> PreparedData:
    data = recipe.data
    names = [_split_of(source.source, "train") for source in data.train]
    others = [_split_of(source.source, "validation") for source in data.validation]
    if "digits" in (*names, *others):
        raise DataError("The source digits has images, but the model reads tokens. Use stdlib, a path, or synthetic.")
    _check_text_columns(data)
    corpora = _Corpora(recipe, shape, workers, progress)
    opened = {name: corpora.open(name) for name in (*names, *others) if name != "synthetic"}

    def make(name: str, split: Split, fraction: float) -> TokenSpec:
        return _token_spec(recipe, shape, opened.get(name), split, fraction)

    fraction = 0.0 if data.validation else data.validation_fraction
    train = [make(name, "train" if fraction else "all", fraction) for name in names]
    validation = [make(name, "validation", fraction) for name in names] if fraction else []
    # Of a source that is named for validation, every document is a validation document.
    validation += [make(name, "validation", 1.0) for name in others]
    lines = [f"{name}: {opened[name].description}" if name in opened else f"{name}: random tokens" for name in names]
    first = next(iter(opened.values()), None)
    return _prepared(recipe, train, validation, str(first.tokenizer_path) if first else None, lines)


def _split_of(name: str, use: Literal["train", "validation"]) -> str:
    """A source of text, or the folder of the split that is meant where it is a `DatasetDict`."""
    path = Path(name).expanduser()
    if not (path / "dataset_dict.json").is_file():
        return name
    from weft.run.data._arrow import split_folder  # files do without

    return str(split_folder(path, use))


def _validation_names(recipe: Recipe) -> list[str]:
    return [source.source for source in recipe.data.validation]


def _token_spec(
    recipe: Recipe, shape: DataShape, corpus: PreparedCorpus | None, split: Split, fraction: float
) -> TokenSpec:
    """Describe the samples of one split of a corpus; None: synthetic."""
    samples = SYNTHETIC_VALIDATION if split == "validation" else SYNTHETIC_SAMPLES
    return TokenSpec(
        folder=str(corpus.folder.resolve()) if corpus else None,
        fingerprint=corpus.fingerprint if corpus else "synthetic",
        split=split,
        validation_fraction=fraction,
        task=_token_task(recipe, shape, corpus),
        num_samples=0 if corpus else samples,
    )


def _token_task(recipe: Recipe, shape: DataShape, corpus: PreparedCorpus | None) -> TokenTask:
    assert shape.vocabulary_size is not None
    assert shape.sequence_length is not None
    mask = corpus.manifest.mask if corpus else shape.vocabulary_size - 1
    if shape.task == "masked_lm" and mask is None:
        raise DataError(
            f"The tokenizer of {corpus.folder if corpus else 'synthetic'} has no mask token, which a masked language "
            f'model needs. Add one, tokenizer.add_special_tokens(["[MASK]"]), and prepare the data again.'
        )
    return TokenTask(
        kind="masked_lm" if shape.task == "masked_lm" else "causal_lm",
        sequence_length=shape.sequence_length,
        vocabulary_size=shape.vocabulary_size,
        separator=corpus.manifest.separator if corpus else 0,
        isolated=recipe.data.documents == "isolated",
        mask_token=mask,
        mask_fraction=recipe.data.mask_fraction,
        random_tokens=corpus.vocabulary_size if corpus else shape.vocabulary_size,
        seed=recipe.run.seed,
    )


class _Corpora:
    """Prepares the sources of a recipe with one tokenizer for all of them."""

    def __init__(self, recipe: Recipe, shape: DataShape, workers: int | None, progress: Progress) -> None:
        assert shape.vocabulary_size is not None
        self._recipe = recipe
        self._vocabulary_size = shape.vocabulary_size
        own = None if shape.processors is None else Path(shape.processors, "tokenizer.json")
        self._own = own if own is not None and own.is_file() else None
        """The model's own tokenizer, where its folder has one."""
        self._workers = workers
        self._progress = progress
        self._digest: tuple[str, str] | None = None
        self._text_field = recipe.data.columns.get("text", "text")
        self._tokenizer = self._find_tokenizer()

    def _find_tokenizer(self) -> Path | None:
        data = self._recipe.data
        if data.tokenizer is not None:
            return Path(data.tokenizer)
        names = [_split_of(source.source, "train") for source in data.train if source.source != "synthetic"]
        ready = [Path(name).expanduser() for name in names if is_prepared(name)]
        if ready:
            return ready[0] / "tokenizer.json"
        if names and self._own is not None:
            return self._own
        if not names:
            return None
        return shared_tokenizer(
            names,
            vocabulary_size=self._vocabulary_size,
            cache=data.cache,
            text_field=self._text_field,
            progress=self._progress,
        )

    def open(self, name: str) -> PreparedCorpus:
        """Prepare or open one source.

        Raises:
            DataError: It was prepared with another tokenizer than the first, or one too large for the model.
        """
        if is_prepared(name):
            corpus = open_corpus(name)
            check_vocabulary(corpus.vocabulary_size, self._vocabulary_size, str(corpus.tokenizer_path))
        else:
            corpus = prepare(
                [name],
                vocabulary_size=self._vocabulary_size,
                tokenizer=self._tokenizer,
                cache=self._recipe.data.cache,
                text_field=self._text_field,
                workers=self._workers,
                progress=self._progress,
            )
        digest = corpus.manifest.tokenizer_digest
        first, expected = self._digest = self._digest or (name, digest)
        if digest != expected:
            raise DataError(
                f"{name} and {first} were prepared with different tokenizers, so the same number means different text. "
                f"Prepare {name} again with {first}'s tokenizer.json (weft data prepare --tokenizer)."
            )
        return corpus


def _prepare_images(recipe: Recipe, shape: DataShape) -> PreparedData:
    from weft.run.data._open_rows import has_rows, is_of_folders  # text does without

    names = [*(source.source for source in recipe.data.train), *_validation_names(recipe)]
    of_rows = [name for name in names if name not in _IMAGE_SOURCES]
    for name in of_rows:
        check_source(name)
        if not (has_rows(name) or is_of_folders(name)):
            raise DataError(
                f"The source {name} is text, but the model does {shape.task}. Use one of: {', '.join(_IMAGE_SOURCES)}, "
                f"a folder of images with a folder per class, or rows of .jsonl or .parquet; for data of another form, "
                f"pass a loader to weft.session."
            )
    if of_rows:
        if len(of_rows) < len(names):
            other = next(name for name in names if name in _IMAGE_SOURCES)
            raise DataError(f"{of_rows[0]} and {other} cannot be blended: their classes differ. Name one of the two.")
        return _prepare_fields(recipe, replace(shape, fields=_of_images(shape)))
    train: list[ImageSpec] = []
    validation: list[ImageSpec] = []
    for source in recipe.data.train:
        one, other = image_specs(source.source, shape)
        train.append(one)
        if not recipe.data.validation and recipe.data.validation_fraction > 0:
            validation.append(other)
    validation += [image_specs(name, shape)[1] for name in _validation_names(recipe)]
    sizes = [spec.open().size for spec in train]
    lines = [f"{spec.source}: {size:,} samples of {spec.shape}" for spec, size in zip(train, sizes, strict=True)]
    return _prepared(recipe, train, validation, None, lines)


def _of_images(shape: DataShape) -> dict[str, SampleField]:
    """Fields of a sample of a model that takes images alone, as rows and folders have them."""
    if shape.image_shape is None:
        raise DataError("The model does not say how large its images are. Give its Blueprint an `example`.")
    is_class = shape.task == "classification"
    below = shape.num_classes if shape.is_num_classes_known else 0
    label = SampleField((), "int64", below) if is_class else SampleField(shape.label_shape, "float32")
    return {"images": SampleField(shape.image_shape, "float32"), "labels": label}
