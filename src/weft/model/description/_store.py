"""Descriptions of models that had to be built, kept for the next time: a plan then needs neither them nor torch.

Only what a `config.json` fully describes is kept.  A factory is a user's code, which may read anything.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.config.recipe import Recipe, hf_config_file, read_hf_config
from weft.config.recipe.hf_folder import read_hf_processors
from weft.files import cache_folder, write_whole
from weft.model.description._description import Description
from weft.model.description._text import of_json, to_json

_DESCRIBING = ("analysis", "config", "model", "techniques/data", "techniques/tensor")
"""Folders of Weft whose code decides what a description says."""
_MOST_BYTES = 32 << 20
_MOST_KEPT = 256
"""Descriptions in the folder: whatever another code or configuration has made is never asked for again."""


def stored(recipe: Recipe) -> Description | None:
    """Return the description that `store` kept of the same model, described by the same code; else None."""
    path = _path(recipe)
    if path is None:
        return None
    with suppress(OSError, ValueError):
        if path.stat().st_size <= _MOST_BYTES:
            return of_json(path.read_text(encoding="utf-8"))
    return None


def store(recipe: Recipe, description: Description) -> None:
    """Keep a description of a recipe's model.  A folder that cannot be written is no error: it is described again."""
    path = _path(recipe)
    if path is not None:
        _keep(path, to_json(description))


def stored_page(recipe: Recipe, writer: Path) -> str | None:
    """Return the page that `store_page` kept of the same model, written by the same code; else None."""
    path = _path(recipe, writer)
    if path is None:
        return None
    with suppress(OSError, ValueError):
        if path.stat().st_size <= _MOST_BYTES:
            return path.read_text(encoding="utf-8")
    return None


def store_page(recipe: Recipe, writer: Path, page: str) -> None:
    """Keep what the code in the file `writer` says of a recipe's model."""
    path = _path(recipe, writer)
    if path is not None:
        _keep(path, page)


def _keep(path: Path, text: str) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        kept = sorted(path.parent.glob(f"*{path.suffix}"), key=lambda file: file.stat().st_mtime)
        for old in kept[:-_MOST_KEPT]:
            old.unlink(missing_ok=True)


def _path(recipe: Recipe, writer: Path | None = None) -> Path | None:
    """Return the file of this model's description by this code, or of a page about it; None where it is not kept."""
    if recipe.model.hf is None:
        return None
    kind = str(read_hf_config(recipe.model.hf).get("model_type", "model")).replace("-", "_")
    whole = hashlib.sha256()
    for part in _parts(recipe, kind):
        whole.update(hashlib.sha256(part).digest())
    if writer is not None:
        whole.update(writer.read_bytes())
    return cache_folder("descriptions", f"{whole.hexdigest()}.{'txt' if writer is not None else 'json'}")


def _parts(recipe: Recipe, kind: str) -> Iterator[bytes]:
    """All that a description follows from: the model's settings and configuration, and the code that builds it."""
    assert recipe.model.hf is not None
    yield hf_config_file(recipe.model.hf).read_bytes()
    processors = read_hf_processors(recipe.model.hf)  # samples have masks, and images a size, by what stands there
    yield repr((processors.tokenizer, processors.image, processors.sound)).encode()
    settings = {field.name: getattr(recipe.model, field.name) for field in fields(recipe.model) if field.name != "hf"}
    yield repr((settings, recipe.data.documents, "bf16" in recipe.permit.precision)).encode()
    yield repr([sys.version, *(_version(name) for name in ("torch", "transformers", "peft"))]).encode()
    weft = Path(__file__).parents[2]
    spec = importlib.util.find_spec("transformers")  # without importing it
    folders = [weft / name for name in _DESCRIBING]
    if spec is not None and spec.origin is not None and kind.isidentifier():  # a name from a file leads nowhere else
        folders.append(Path(spec.origin).parent / "models" / kind)
    for folder in folders:
        files = sorted(folder.rglob("*.py"))
        assert files or folder.parent.name == "models", f"{folder} has moved: what is kept would outlive its code"
        for file in files:
            yield file.read_bytes()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
