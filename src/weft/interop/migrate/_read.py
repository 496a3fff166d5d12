"""The files of other systems, read strictly: no key twice, and nothing that is not plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from weft.errors import RecipeError, did_you_mean
from weft.interop.migrate._accelerate import BATCH_SIZE, read_accelerate
from weft.interop.migrate._deepspeed import read_deepspeed
from weft.interop.migrate._keys import MigratedSettings, keys_of
from weft.interop.migrate._migration import Migration, migration_of

_LARGEST_FILE = 4_000_000


def read_config(path: str | Path, *, processes: int | None = None, fill: Mapping[str, Any] | None = None) -> Migration:
    """Read a configuration of DeepSpeed (JSON) or Accelerate (YAML or JSON) as a plan and what a recipe says with it.

    Args:
        path: the file; one with `distributed_type` or `compute_environment` is Accelerate's.
        processes: how many there are, where the file does not say it.
        fill: dotted key → value of what transformers would fill in where the file says `auto`; and `batch_size`, that
            of a process, which Accelerate leaves to the script.

    Raises:
        RecipeError: the file cannot be read, or keys are refused: each by its name, with what to write instead.
    """
    path = Path(path)
    return read_settings(read_table(path), path.name, path.parent, processes=processes, fill=fill)


def read_settings(
    table: Mapping[str, Any],
    name: str,
    beside: Path = Path(),
    *,
    processes: int | None = None,
    fill: Mapping[str, Any] | None = None,
) -> Migration:
    """`read_config` of a configuration that is no file: `name` is what errors call it, `beside` where the files are
    that it names."""
    settings, filled = MigratedSettings(), dict(fill or {})
    _refuse_unknown(filled)
    if "distributed_type" in table or "compute_environment" in table:
        read_accelerate(table, settings, processes, filled, lambda file: read_table(beside / file))
    else:
        read_deepspeed(table, settings, processes, filled)
    return migration_of(settings, name)


def _refuse_unknown(filled: Mapping[str, Any]) -> None:
    known = {
        name for key, rule in keys_of("deepspeed").items() if rule.filled is not None for name in (key, rule.wants)
    }
    for name in filled:
        if name not in known | {BATCH_SIZE}:
            raise RecipeError(f"--fill {name}: transformers fills no such key.{did_you_mean(name, known)}")


def read_table(path: Path) -> Mapping[str, Any]:
    """Return the table that a JSON or YAML file holds.

    Raises:
        RecipeError: it cannot be read, is no table, or has a key twice.
    """
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise RecipeError(f"{path} has {path.stat().st_size:,} bytes, and a configuration has a few thousand.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is not text in UTF-8.") from None
    loaded = _yaml(path, text) if path.suffix in (".yaml", ".yml") else _json(path, text)
    if not isinstance(loaded, dict):
        raise RecipeError(f"{path} holds no table of keys. A configuration begins with {{, or with key: value.")
    return cast("dict[str, Any]", loaded)


def _json(path: Path, text: str) -> Any:
    def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for name, value in pairs:
            if name in table:
                raise RecipeError(f"{path}: the key {name} stands there twice. Leave one of the two.")
            table[name] = value
        return table

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise RecipeError(f"{path}:{error.lineno} is not JSON: {error.msg}.") from None
    except RecursionError:
        raise RecipeError(f"{path} is nested too deeply for a configuration.") from None


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise RecipeError(
            f"{path} is YAML, which PyYAML reads, and it is not installed. Run pip install pyyaml (it comes with"
            " weft[hf]), or save the file as JSON."
        ) from None
    try:
        node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_twice(path, node)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise RecipeError(f"{path} is nested too deeply for a configuration.") from None


def _refuse_twice(path: Path, node: Any) -> None:
    """Raise where a table has a key twice, of which YAML's readers take the last without a word."""
    pairs: list[Any] = node.value if getattr(node, "id", "") == "mapping" else []
    seen: set[str] = set()
    for key, value in pairs:
        if key.value in seen:
            line = key.start_mark.line + 1
            raise RecipeError(f"{path}:{line}: the key {key.value} stands there twice. Leave one of the two.")
        seen.add(key.value)
        _refuse_twice(path, value)
