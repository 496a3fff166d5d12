"""Files beside a Hugging Face model's `config.json`: settings of its tokenizer and processors, plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.document import JsonObject, read_plain_file
from weft.config.recipe._hf_config import hf_config_file
from weft.errors import RecipeError

TOKENIZER_CONFIG = "tokenizer_config.json"
_PREPROCESSOR = "preprocessor_config.json"
_PROCESSOR = "processor_config.json"
_STEMS = (
    *("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "normalizer", "spiece", "sentencepiece"),
    *("preprocessor", "processor", "chat_template", "source", "target"),
)
"""Their file names begin with one of these: none of weights, of the model's configuration, or of a past training."""
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class HfProcessors:
    """Settings of what prepares a model's inputs; None: the folder has none of this kind."""

    folder: Path
    tokenizer: Mapping[str, Any] | None
    image: Mapping[str, Any] | None
    sound: Mapping[str, Any] | None

    @property
    def is_empty(self) -> bool:
        return self.tokenizer is None and self.image is None and self.sound is None

    @property
    def files(self) -> list[Path]:
        """All files that say what they do, by name: neither the model's configuration nor its weights."""
        suffixes = (".json", ".txt", ".model", ".jinja")
        names = (path for path in self.folder.iterdir() if path.name.startswith(_STEMS) and path.suffix in suffixes)
        return sorted(path for path in names if path.is_file())

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of what the image processor gives; None: it does not say."""
        settings = self.image or {}
        for name in ("crop_size", "size"):
            if name == "crop_size" and not settings.get("do_center_crop"):
                continue
            size = settings.get(name)
            if type(size) is int:
                return (size, size)
            if isinstance(size, dict) and isinstance(size.get("height"), int) and isinstance(size.get("width"), int):
                return (int(size["height"]), int(size["width"]))
        return None


def read_hf_processors(location: str) -> HfProcessors:
    """Return what a model's folder says of its tokenizer and processors.

    Raises:
        RecipeError: a file of them is no JSON object; names it.
    """
    folder = hf_config_file(location).parent
    is_of_text = any((folder / name).is_file() for name in ("tokenizer.json", TOKENIZER_CONFIG))
    joined = _read(folder / _PROCESSOR)
    tables = [_read(folder / _PREPROCESSOR), joined, *(joined.get(name) for name in joined)]
    settings = [one for one in tables if isinstance(one, dict)]
    return HfProcessors(
        folder,
        tokenizer=_read(folder / TOKENIZER_CONFIG) if is_of_text else None,
        image=next((one for one in settings if _is_of_images(one)), None),
        sound=next((one for one in settings if "sampling_rate" in one), None),
    )


def _is_of_images(settings: Mapping[str, Any]) -> bool:
    return "image_processor_type" in settings or ("do_normalize" in settings and "sampling_rate" not in settings)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    advice = "Let transformers write it again (save_pretrained), or remove it."
    content = read_plain_file(file.resolve(), RecipeError, advice, most_bytes=_MOST_BYTES)
    return dict(JsonObject.parse(file, content, RecipeError, advice).values)
