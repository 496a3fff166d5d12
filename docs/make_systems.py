"""Write what another system's command line and configuration can say: `src/weft/interop/systems/data/SYSTEM.json`.

    python docs/make_systems.py SYSTEM VERSION FOLDER

FOLDER holds the system's package at that version and goes to the front of the import path.  Names, types, choices and
defaults are facts and are kept; no text of the system is.  What its argument check demands stands in `checks` of the
same file, written by hand, and is left as it is.  The systems are no dependencies of Weft: run this where they can be
imported, and look at the difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parents[1] / "src" / "weft" / "interop" / "systems" / "data"


def _plain(value: object) -> Any:
    """What JSON can hold."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in typing.cast(list[object], value)]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _arguments(parser: argparse.ArgumentParser) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for action in parser._actions:  # noqa: SLF001 - argparse shows them nowhere else
        kind = getattr(action.type, "__name__", None) if action.type is not None else None
        entry = {
            "destination": action.dest,
            "type": kind,
            "nargs": 0 if action.nargs == 0 else action.nargs,
            "choices": sorted(map(str, action.choices)) if action.choices is not None else None,
            "default": _plain(action.default),
            "constant": _plain(action.const),
        }
        kept = {name: value for name, value in entry.items() if value is not None}
        options |= {option: kept for option in action.option_strings if option not in ("-h", "--help")}
    return {"arguments": dict(sorted(options.items()))}


def _megatron() -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module("megatron.training.arguments").add_megatron_arguments(parser)
    return _arguments(parser)


def _accelerate() -> dict[str, Any]:
    launch = importlib.import_module("accelerate.commands.launch").launch_command_parser()
    cluster = importlib.import_module("accelerate.commands.config.config_args").ClusterConfig
    return {**_arguments(launch), "keys": sorted(field.name for field in dataclasses.fields(cluster))}


def _deepspeed() -> dict[str, Any]:
    """The nested tables are checked by pydantic; the keys beside them by nothing: the constants list them."""
    sections: dict[str, dict[str, Any]] = {}
    for name, (module, model) in {
        "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
        "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    }.items():
        fields = getattr(importlib.import_module(module), model).model_fields
        sections[name] = {key: _kind(field.annotation) for key, field in sorted(fields.items())}
    constants = importlib.import_module("deepspeed.runtime.constants")
    keys = {value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)}
    launcher = importlib.import_module("deepspeed.launcher.runner")
    return {
        **_arguments(_parser_of(launcher.parse_args)),
        "sections": sections,
        "keys": sorted(filter(str.isidentifier, keys)),
    }


class _Seen(Exception):  # noqa: N818 - it ends a function, and is no error
    """Carries a parser out of the function that makes and uses it."""


def _parser_of(parse: Callable[[list[str]], object]) -> argparse.ArgumentParser:
    original = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> object:
        raise _Seen(self)

    argparse.ArgumentParser.parse_args = stop  # type: ignore[assignment, method-assign]
    try:
        parse([])
    except _Seen as seen:
        return seen.args[0]
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
    raise RuntimeError("the function made no parser")


def _torchtitan() -> dict[str, Any]:
    config = importlib.import_module("torchtitan.trainer").Trainer.Config
    hints = typing.get_type_hints(config, include_extras=True)
    sections: dict[str, dict[str, Any]] = {"": {}}
    for field in dataclasses.fields(config):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            inner = typing.get_type_hints(kind)
            names = [each.name for each in dataclasses.fields(kind)]
            sections[field.name] = {name: _kind(inner[name]) for name in names}
        else:
            sections[""][field.name] = "object"
    return {"sections": sections}


def _kind(annotation: Any) -> Any:
    """The type in words; a list for a choice among values."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return list(typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return "|".join(str(_kind(each)) for each in typing.get_args(annotation))
    return getattr(annotation, "__name__", str(annotation)) if origin is None else str(annotation)


_READERS: dict[str, Callable[[], dict[str, Any]]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
}


def main(system: str, version: str, folder: str) -> None:
    """Write the file of one system."""
    sys.path.insert(0, folder)
    path = _DATA / f"{system}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = {name: before.get(name, default) for name, default in (("source", ""), ("checks", []))}
    facts = {"system": system, "version": version, **kept, **_READERS[system]()}
    path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
