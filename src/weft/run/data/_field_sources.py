"""Makes sets of samples with named fields from a recipe's sources: chooses splits, and finds classes and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from weft.config.recipe import DataRecipe
from weft.errors import DataError, did_you_mean
from weft.model.families import SampleField
from weft.run.data._fields import Split
from weft.run.data._named import FileFields, describe_named, other_names
from weft.run.data._open_rows import digest_of, has_rows, is_of_folders, open_rows
from weft.run.data._processors import FolderProcessors, digest_of_processors
from weft.run.data._rows import SourceRows
from weft.run.data._samples import SYNTHETIC_SAMPLES, SYNTHETIC_VALIDATION, FieldSpec
from weft.run.data._sources import check_source

_SHOWN = 6
_TRIED = 1000
"""Samples that are looked at to say how many texts are cut."""


class FieldSources:
    """Sets of samples of a recipe's sources.

    Raises:
        DataError: a source cannot feed the model, or has classes that the model does not have.
    """

    def __init__(
        self,
        data: DataRecipe,
        named: Mapping[str, SampleField],
        classes: Mapping[str, int],
        processors: str | None = None,
    ) -> None:
        self._data, self._named, self._folder = data, named, processors
        self._processors = None if processors is None else FolderProcessors(Path(processors), named, data.columns)
        self._check_columns()
        self._digests: dict[Path, str] = {}
        names, others = [source.source for source in data.train], [source.source for source in data.validation]
        self._paths = {("train", name): self._path(name, "train") for name in names if name != "synthetic"}
        self._paths |= {("validation", name): self._path(name, "validation") for name in others if name != "synthetic"}
        self._rows = {key: open_rows(path) for key, path in self._paths.items()}
        self._names = {key: self._names_of(rows) for key, rows in self._rows.items()}
        """Source → names of its classes; empty: its labels are numbers, or no classes."""
        self._classes = self._numbered(classes)
        fraction = 0.0 if others else data.validation_fraction
        self.train = [self._make("train", name, "train" if fraction else "all", fraction) for name in names]
        self.validation: list[FieldSpec] = []
        if "labels" in named:  # else nothing could say that a sample which only fills up a batch does not count
            self.validation += [self._make("train", name, "validation", fraction) for name in names if fraction]
            self.validation += [self._make("validation", name, "validation", 1.0) for name in others]
        self.description = [self._line(name, spec) for name, spec in zip(names, self.train, strict=True)]
        if others and not self.validation:
            self.description.append("data.validation is not read: samples without labels cannot be evaluated")

    def _check_columns(self) -> None:
        known = [one for name, field in self._named.items() for one in (name, *other_names(name, field))]
        known += [] if self._processors is None else self._processors.columns
        known = list(dict.fromkeys(known))
        for name in self._data.columns:
            if name not in known:
                raise DataError(
                    f"data.columns names {name}, which is not looked for in rows.{did_you_mean(name, known)} It may"
                    f" name {', '.join(known)}."
                )

    def _path(self, name: str, use: Literal["train", "validation"]) -> Path:
        path = Path(name).expanduser().resolve()
        check_source(name)
        kinds = {"image": "images", "audio": "sounds"}
        by_class = [words for kind, words in kinds.items() if kind in self._columns_of_files()]
        if not has_rows(name) and not (by_class and is_of_folders(name)):
            folder = f", a folder of {by_class[0]} with a folder per class" if by_class else ""
            raise DataError(
                f"The source {name} cannot feed this model, whose samples have {describe_named(self._named)}. Use"
                f" synthetic, a file of JSON lines (.jsonl) or Parquet with these fields{folder}, or a data set that"
                " `datasets` saved to disk."
            )
        if (path / "dataset_dict.json").is_file():
            from weft.run.data._arrow import split_folder  # the others do without

            return split_folder(path, use)
        return path

    def _columns_of_files(self) -> set[str]:
        return {one for name, field in self._named.items() for one in other_names(name, field)} - {"label"}

    def _make(self, use: str, name: str, split: Split, fraction: float) -> FieldSpec:
        if name == "synthetic":
            size = SYNTHETIC_VALIDATION if split == "validation" else SYNTHETIC_SAMPLES
            return FieldSpec(file=None, split=split, validation_fraction=0.0, named=self._named, num_samples=size)
        path = self._paths[use, name]
        if path not in self._digests:
            self._digests[path] = digest_of(path)
        return FieldSpec(
            file=str(path),
            split=split,
            validation_fraction=fraction,
            named=self._named,
            digest=self._digests[path],
            classes=self._classes,
            columns=self._data.columns,
            processors=self._folder,
            processors_digest="" if self._folder is None else digest_of_processors(Path(self._folder)),
        )

    # ── classes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _numbered(self, of_model: Mapping[str, int]) -> Mapping[str, int]:
        """Name of a class → its number: by the model where it names them, else by the sources for training."""
        label = self._named.get("labels")
        if label is not None and label.dtype == "float32":
            for (_, name), names in self._names.items():
                if names:
                    raise DataError(
                        f"{name} has classes ({_shown(names)}), but the model takes numbers as labels. Set"
                        ' problem_type = "single_label_classification" in config.json, or give numbers.'
                    )
        if label is None or not self._names:
            return {}
        if of_model:
            for (_, name), names in self._names.items():
                self._check_known(name, names, of_model, "the model's label2id")
            return of_model
        listed = list(dict.fromkeys(names for (use, _), names in self._names.items() if use == "train" and names))
        # One list keeps its order, which a data set may have chosen; of several there is no common one.
        names = listed[0] if len(listed) == 1 else sorted({name for names in listed for name in names})
        classes = {name: number for number, name in enumerate(names)}
        self._check_count(classes, label)
        for (use, name), names in self._names.items():
            if use == "validation" and classes:
                self._check_known(name, names, classes, "the data for training")
        return classes

    def _names_of(self, rows: SourceRows) -> tuple[str, ...]:
        label = self._named.get("labels")
        if label is None:
            return ()
        columns = self._data.columns
        is_tags = label.dtype == "int64" and bool(label.shape)
        candidates = (rows.classes_of(columns.get(one, one), declared=is_tags) for one in ("labels", "label", "tags"))
        names = next((names for names in candidates if names), ())
        is_of_files = label.dtype == "float32" and all(name.endswith(".npy") for name in names)
        return () if is_of_files else tuple(names)

    def _check_known(self, source: str, names: Sequence[str], classes: Mapping[str, int], where: str) -> None:
        unknown = next((name for name in names if name not in classes), None)
        if unknown is not None:
            raise DataError(
                f"{source} has a class {unknown}, which {where} does not have.{did_you_mean(unknown, classes)} It has"
                f" {_shown(list(classes))}. Rename the class, or add it there."
            )

    def _check_count(self, classes: Mapping[str, int], label: SampleField) -> None:
        if label.below and len(classes) > label.below:
            raise DataError(
                f"The data have {len(classes)} classes ({_shown(list(classes))}), but the model has {label.below}. Set"
                f" num_classes = {len(classes)} (in config.json, name them in id2label and label2id)."
            )

    # ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _line(self, name: str, spec: FieldSpec) -> str:
        """Return a line on a source for the start of a run.  The first sample is read: errors then precede ranks."""
        words = describe_named(self._named)
        if name == "synthetic":
            return f"{name}: {spec.num_samples:,} samples of {words}"
        rows, path = self._rows["train", name], self._paths["train", name]
        samples = spec.open(rows)
        assert isinstance(samples, FileFields)
        samples.read(np.zeros(1, np.int64), np.zeros(1, np.int64))
        names = sorted(self._names["train", name], key=lambda one: self._classes.get(one, 0))
        classes = ", ".join(f"{one} = {self._classes[one]}" for one in names[:_SHOWN] if one in self._classes)
        more = ", …" if len(names) > _SHOWN else ""
        parts = [f"{len(names)} classes: {classes}{more}"] if classes else []
        line = f"{name}: {samples.size:,} samples of {words}"
        return "; ".join([line, *parts, *self._makers(samples), *rows.notes, *self._other_splits(name, path)])

    def _makers(self, samples: FileFields) -> list[str]:
        """Return lines on the processors that make fields, and on the texts that they cut off."""
        made = {} if self._processors is None else self._processors.names
        lines = [] if self._processors is None else list(self._processors.words)
        for name, field in self._named.items():
            if other_names(name, field) == ["image"] and name not in made:
                lines.append(f"{name} resized, with values from 0 to 1")
        cut, tried = samples.num_cut(_TRIED)
        if cut:
            lines.append(f"longer texts are cut at their end ({cut:,} of the first {tried:,})")
        return lines

    def _other_splits(self, name: str, path: Path) -> list[str]:
        """Return a line on the splits of a `DatasetDict` that are not read."""
        folder = Path(name).expanduser().resolve()
        if folder == path:
            return []
        from weft.run.data._arrow import splits_of

        read = {self._paths[key].name for key in self._paths if Path(key[1]).expanduser().resolve() == folder}
        left = [split for split in splits_of(folder) or () if split not in read]
        return [f"its split {path.name}", *([f"{', '.join(left)} not read"] if left else [])]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
