"""Makes fields from rows by the model's own tokenizer, image processor and feature extractor.

They are classes of `transformers`, loaded from the model's folder; no code of the folder runs, nothing is downloaded.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.recipe.hf_folder import read_hf_processors
from weft.errors import DataError
from weft.model.families import SampleField
from weft.run.data._classes import class_number
from weft.run.data._fields import IGNORED, Fields
from weft.run.data._media import opened, read_image, read_wave
from weft.run.data._rows import Row, digest_of_files

_MASKS = ("attention_mask", "token_type_ids")
SOUNDS = ("input_values", "input_features")
_LOCK = threading.Lock()
"""A tokenizer keeps what it was last asked to cut and to fill up, so that threads must take turns."""


class FolderProcessors:
    """The processors of a model's folder.  Threads may share them.

    Raises:
        DataError: transformers cannot load what the folder names.
    """

    def __init__(
        self,
        folder: Path,
        named: Mapping[str, SampleField],
        columns: Mapping[str, str] | None = None,
        classes: Mapping[str, int] | None = None,
    ) -> None:
        self._folder, self._named = folder, named
        self._columns, self._classes = columns or {}, classes or {}
        self._is_captioned = self._is_tagged = False
        settings = read_hf_processors(str(folder))
        self._makers: dict[str, Callable[[Row, Any], Fields]] = {}
        self._names: dict[str, list[str]] = {}
        self._words: list[str] = []
        if settings.tokenizer is not None:
            self._take_texts()
        for name, field in named.items():
            if settings.image is not None and len(field.shape) == 3 and field.dtype == "float32":
                self._take(name, ["image"], self._image, "AutoImageProcessor", backend="pil")
            elif settings.sound is not None and name in SOUNDS:
                self._take(name, ["audio"], self._sound, "AutoFeatureExtractor")

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        """Field → other names of the column of which it is made."""
        return self._names

    @property
    def words(self) -> Sequence[str]:
        """Lines on the processors and the fields that they make, for the start of a run."""
        return self._words

    @property
    def columns(self) -> list[str]:
        """All names of columns that are looked for."""
        others = ["text_pair"] if "input_ids" in self._makers else []
        others += ["tags"] if self._is_tagged else []
        return [*(one for names in self._names.values() for one in names), *others]

    def makes(self, name: str, value: Any) -> bool:
        """Whether a field is made of this value of its column."""
        if name not in self._makers:
            return False
        if name in ("input_ids", "labels"):
            return isinstance(value, str) or (name == "input_ids" and isinstance(value, list))
        return isinstance(value, bytes) or (isinstance(value, str) and not value.endswith(".npy"))

    def make(self, row: Row, name: str, value: Any) -> Fields:
        """Return the field, and those that come with it.

        Raises:
            ValueError: the value is none of which it can be made.
        """
        return self._makers[name](row, value)

    def is_cut(self, name: str, value: Any) -> bool:
        """Whether a text is longer than the model takes it."""
        if name not in self._makers or name not in ("input_ids", "labels") or not isinstance(value, str):
            return False
        with _LOCK:
            return len(self._tokenizer(value).input_ids) > self._named[name].shape[0]

    # ── loading ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _load(self, kind: str, **settings: Any) -> Any:
        auto = getattr(importlib.import_module("transformers"), kind)
        try:
            return auto.from_pretrained(str(self._folder), local_files_only=True, trust_remote_code=False, **settings)
        except Exception as problem:  # what its many classes raise
            said = next(iter(str(problem).strip().splitlines()), "") or type(problem).__name__
            raise DataError(
                f"transformers cannot load the {kind.removeprefix('Auto')} of {self._folder}: {said.rstrip('.')}."
                " Save it again (save_pretrained), or remove its files."
            ) from None

    def _take(self, name: str, names: list[str], make: Callable[..., Fields], kind: str, **settings: Any) -> None:
        loaded = self._load(kind, **settings)
        # Every draw of a run is keyed by its sample; this one is made inside of the library.
        if getattr(loaded, "dither", 0):
            raise DataError(
                f"The {type(loaded).__name__} of {self._folder} adds random numbers to sounds (dither ="
                f" {loaded.dither:g}), so that no run could be repeated. Set dither = 0.0 in preprocessor_config.json."
            )
        self._makers[name] = lambda row, value: make(row, value, name, loaded)
        self._names[name] = names
        self._words.append(f"{name} by {type(loaded).__name__}")

    def _take_texts(self) -> None:
        """Texts become tokens; texts that are answers become labels."""
        named = self._named
        has_sound = any(name in SOUNDS for name in named)
        is_read = "input_ids" in named
        labels = named.get("labels")
        follows = any(field.follows is not None and field.follows[0] == "labels" for field in named.values())
        places = labels.shape if labels is not None and labels.dtype == "int64" else ()
        # Texts are answers where a decoder follows the labels, or a sound is their input (speech recognition).
        # Otherwise they are read, and labels of the same shape are tags of words, or the continuation of a caption.
        is_written = len(places) == 1 and (follows or has_sound)
        has_image = any(len(field.shape) == 3 for field in named.values())
        is_continued = is_read and not is_written and places == named["input_ids"].shape
        self._is_captioned = is_continued and has_image
        self._is_tagged = is_continued and not has_image
        if not (is_read or is_written):
            return
        self._tokenizer: Any = self._load("AutoTokenizer")
        if is_read:
            self._makers["input_ids"], self._names["input_ids"] = self._text, ["text"]
        if is_written:
            names = ["target"] if is_read else ["target", "text"]
            self._makers["labels"], self._names["labels"] = self._target, names
        fields = [name for name in ("input_ids", "labels") if name in self._makers]
        self._words.append(f"{' and '.join(fields)} by {type(self._tokenizer).__name__}")

    # ── making ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _text(self, row: Row, value: Any) -> Fields:
        """Tokens of a text (and of `text_pair`), or tokens that are there already, filled up."""
        token, pieces = self._named["input_ids"].prompt
        length = self._named["input_ids"].shape[0] - pieces
        settings = {"truncation": True, "max_length": length, "return_token_type_ids": True}
        tags: Fields = {}
        if isinstance(value, str):
            pair = row.values.get(self._columns.get("text_pair", "text_pair"))
            with _LOCK:
                made = self._tokenizer(value, pair, **settings)
        elif value and isinstance(value[0], str):
            with _LOCK:
                made = self._tokenizer(value, is_split_into_words=True, **settings)
            tags = self._tags(row, len(value), made.word_ids(0)) if self._is_tagged else tags
        else:
            made = {"input_ids": value, **{name: row.values[name] for name in _MASKS if name in row.values}}
            pieces, length = 0, length + pieces
        made = self._filled(dict(made), length)
        fillers = {"input_ids": token, "attention_mask": 1, "token_type_ids": 0}
        fields = {name: np.asarray([filler] * pieces + list(made[name])) for name, filler in fillers.items()}
        if self._is_captioned and isinstance(value, str) and "labels" not in row.values:
            tags = {"labels": _continued(fields["input_ids"], fields["attention_mask"], pieces)}
        return tags | {name: values for name, values in fields.items() if name in self._named}

    def _tags(self, row: Row, num_words: int, words: Sequence[int | None]) -> Fields:
        """Tags of words at the first token of each; the other tokens count for nothing."""
        names = (self._columns.get(one, one) for one in ("labels", "tags"))
        tags = next((row.values[name] for name in names if name in row.values), None)
        if not isinstance(tags, list) or len(tags) != num_words:
            description = f"{len(tags)} tags" if isinstance(tags, list) else "no tags"
            raise ValueError(f"{num_words} words, and {description} (in the columns labels or tags)")
        labels = np.full(self._named["labels"].shape, IGNORED, np.int64)
        # From behind: a token of the same word as the one before it is no first token, and gives its tag up.
        for place, word in reversed(list(enumerate(words))):
            if word is not None:
                tag = tags[word]
                labels[place] = class_number(tag, self._classes) if isinstance(tag, str) else tag
                if place and words[place - 1] == word:
                    labels[place] = IGNORED
        return {"labels": labels}

    def _filled(self, made: dict[str, Any], length: int) -> dict[str, Any]:
        count = len(made["input_ids"])
        made.setdefault("attention_mask", [1] * count)
        made.setdefault("token_type_ids", [0] * count)
        if count >= length:
            return made
        if "attention_mask" not in self._named:
            raise ValueError(f"{count} tokens, and the model takes {length} and no mask for those that fill up")
        if self._tokenizer.pad_token_id is None:
            raise ValueError(f"{count} tokens, and nothing to fill them up: name a pad_token in tokenizer_config.json")
        with _LOCK:
            return dict(self._tokenizer.pad(made, padding="max_length", max_length=length))

    def _target(self, row: Row, value: Any) -> Fields:
        """Labels of a text; behind it they count for nothing."""
        field = self._named["labels"]
        with _LOCK:
            ids = list(self._tokenizer(text_target=str(value)).input_ids)
        starts = [one.follows[1] for one in self._named.values() if one.follows is not None]
        if ids[:1] == starts[:1]:  # Whisper's tokenizer gives the start that the decoder gets anyhow
            ids = ids[1:]
        length = field.shape[0]
        if len(ids) > length and not starts:
            raise ValueError(f"{len(ids)} letters, and the model takes {length}. Cut sound and text into pieces")
        labels = np.full(length, IGNORED, np.int64)
        labels[: len(ids)] = ids[:length]
        return {"labels": labels}

    def _image(self, row: Row, value: str | bytes, name: str, processor: Any) -> Fields:
        shape = self._named[name].shape
        image = read_image(opened(row, value), shape[0])
        made = np.asarray(processor(images=[image], return_tensors="np")["pixel_values"])
        if made.shape != (1, *shape):
            raise ValueError(
                f"{type(processor).__name__} makes {_by(made.shape[1:])} of it: change `size` in"
                " preprocessor_config.json, or image_size in config.json"
            )
        return {name: made[0].astype(np.float32)}

    def _sound(self, row: Row, value: str | bytes, name: str, extractor: Any) -> Fields:
        wave, rate = read_wave(opened(row, value))
        if rate != extractor.sampling_rate:
            takes = f"{type(extractor).__name__} takes {extractor.sampling_rate:,}"
            raise ValueError(f"{rate:,} values a second, and {takes}. Resample it")
        shape = self._named[name].shape
        most = shape[0] if len(shape) == 1 else int(getattr(extractor, "n_samples", 0) or len(wave))
        if len(wave) > most:
            raise ValueError(f"{len(wave):,} values of sound, more than the {most:,} that it takes. Cut it into pieces")
        if len(shape) == 1 and len(wave) < most and getattr(extractor, "return_attention_mask", False):
            raise ValueError(
                f"{len(wave):,} values of sound, and the model takes {most:,} and no mask for what fills up"
            )
        made = self._extracted(extractor, wave, rate, name, shape)
        if made.shape != shape:
            raise ValueError(
                f"{type(extractor).__name__} makes {_by(made.shape)} of it: let preprocessor_config.json and"
                " config.json agree on bands and length"
            )
        return {name: made.astype(np.float32)}

    def _extracted(
        self, extractor: Any, wave: NDArray[np.float32], rate: int, name: str, shape: tuple[int, ...]
    ) -> NDArray[Any]:
        """Return an extractor's values, filled up to the shape that the model takes if the extractor does not do so."""
        settings = {"sampling_rate": rate, "return_tensors": "np"}
        if len(shape) == 1:
            return np.asarray(extractor([wave], padding="max_length", max_length=shape[0], **settings)[name])[0]
        made = np.asarray(extractor(wave, **settings)[name])[0]
        if made.shape == shape:
            return made
        filled = extractor(wave, padding="max_length", max_length=max(shape), **settings)
        return np.asarray(filled[name])[0]


def _continued(ids: NDArray[np.int64], mask: NDArray[np.int64], pieces: int) -> NDArray[np.int64]:
    """Return labels: at every position the next token, if that is one of the text; else −100."""
    counts = mask.astype(bool) & (np.arange(len(ids)) >= pieces)
    return np.append(np.where(counts, ids, IGNORED)[1:], IGNORED)


def digest_of_processors(folder: Path) -> str:
    """Hash of all that says what the processors of a folder do."""
    return digest_of_files(read_hf_processors(str(folder)).files)


def _by(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))
