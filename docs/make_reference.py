"""Write docs/reference: settings from dataclasses, commands from their parsers, the Python API from its docstrings.

    python docs/make_reference.py

A test compares the pages with what this would write, so they cannot go stale.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from command_reference import command_page
from python_reference import python_pages

from weft.config.cluster import (
    AttentionSpeed,
    BlockTime,
    CollectiveTime,
    Devices,
    LinkTier,
    MatrixSpeed,
    Measured,
    MemorySpeed,
    Node,
)
from weft.config.document import format_value
from weft.config.document._write import describe_fields  # pyright: ignore[reportPrivateUsage]
from weft.config.plan import Plan, plan_schema
from weft.config.pool import (
    ClaimedVolume,
    KubernetesSettings,
    MpiSettings,
    Pool,
    PoolHost,
    RaySettings,
    SlurmSettings,
    SshSettings,
)
from weft.config.recipe import (
    AdapterRecipe,
    ConvNetShape,
    DataSource,
    DecoderShape,
    EncoderShape,
    MlpShape,
    OnFailure,
    ParameterGroup,
    ProfileRecipe,
    Recipe,
)

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/make_reference.py from the dataclasses' own docstrings. Do not edit. -->"
SHAPES = {"decoder": DecoderShape, "encoder": EncoderShape, "mlp": MlpShape, "convnet": ConvNetShape}
WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", NoneType: "nothing"}


def recipe_page() -> str:
    lines = [NOTE, "", "# recipe.toml: what to train", ""]
    lines += [
        "A recipe says nothing about devices. Every setting can be overridden on the command line by"
        " `--set recipe.<section>.<name>=<value>`. Unknown names, wrong types and impossible sizes are errors.",
    ]
    lines += _sections(Recipe, {"model": _shapes(), "data": _items("train and validation", DataSource)})
    lines += _items("[run.profile]", ProfileRecipe) + _items("[run.on_failure]", OnFailure)
    lines += _items("[model.adapter]", AdapterRecipe) + _items("[[optimizer.groups]]", ParameterGroup)
    return _text(lines)


def plan_page() -> str:
    lines = [NOTE, "", "# plan.toml: how to split it", ""]
    lines += [
        "A plan never changes the mathematics beyond what the recipe permits. Every setting has a default and can be"
        " overridden on the command line by `--set plan.<section>.<name>=<value>`.",
        "",
        "A plan may say more than the engine can run today: such a setting is refused when a run starts, with the value"
        " to use instead.",
    ]
    return _text([*lines, *_sections(Plan, {})])


def cluster_page() -> str:
    lines = [NOTE, "", "# cluster.toml: where to train", ""]
    lines += [
        "`weft probe --output cluster.toml` writes such a file for the machine or the job that it runs in. Devices are"
        " numbered node by node, in the order of the file.",
    ]
    lines += _items("[[nodes]]", Node) + _items("[nodes.devices]", Devices) + _items("[[links]]", LinkTier)
    lines += _items("links.measured", CollectiveTime) + _items("[nodes.devices.measured]", Measured)
    rows = {"matrix": MatrixSpeed, "attention": AttentionSpeed, "memory": MemorySpeed, "blocks": BlockTime}
    for name, row in rows.items():
        lines += _items(name, row)
    return _text(lines)


def pool_page() -> str:
    lines = [NOTE, "", "# pool.toml: who starts Weft where", ""]
    lines += ["A pool is given as `--on PLACE:pool.toml`, or by its name where it lies in `~/.config/weft/pools`."]
    lines += _items("[pool]", Pool)[2:]
    tables = {
        "ssh": SshSettings,
        "mpi": MpiSettings,
        "slurm": SlurmSettings,
        "kubernetes": KubernetesSettings,
        "ray": RaySettings,
    }
    for name, table in tables.items():
        lines += _items(f"[{name}]", table)
    return _text([*lines, *_items("hosts", PoolHost), *_items("volumes", ClaimedVolume)])


def _sections(root: type[Any], after: dict[str, list[str]]) -> Iterator[str]:
    hints = typing.get_type_hints(root)
    for field in dataclasses.fields(root):
        if field.name == "origins":
            continue
        section = hints[field.name]
        yield from ("", f"## [{field.name}]", "", *_intro(section), *_table(section))
        yield from after.get(field.name, [])


def _shapes() -> list[str]:
    lines: list[str] = []
    for name, shape in SHAPES.items():
        lines += ["", f'### reference = "{name}"', "", *_intro(shape), *_table(shape)]
    return lines


def _items(title: str, item: type[Any]) -> list[str]:
    heading = f"## {title}" if title.startswith("[") else f"### Entries of {title}"
    return ["", heading, "", *_intro(item), *_table(item)]


def _intro(cls: type[Any]) -> list[str]:
    text = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    return [text, ""]


def _table(cls: type[Any]) -> Iterator[str]:
    yield "| setting | takes | default | meaning |"
    yield "|---|---|---|---|"
    hints, described = typing.get_type_hints(cls), describe_fields(cls)
    for field in dataclasses.fields(cls):
        if "flattened" in field.metadata or field.name == "origins" or not field.metadata.get("in_document", True):
            continue
        meaning = described.get(field.name, "").replace("|", "\\|")
        yield f"| `{field.name}` | {_type(hints[field.name])} | {_default(field)} | {meaning} |"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "**required**"
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    if value is None or value == {} or value == () or dataclasses.is_dataclass(value):
        return "–"
    if isinstance(value, tuple) and dataclasses.is_dataclass(value[0]):
        return "`" + format_value([{"source": item.source} for item in value]) + "`"
    return f"`{format_value(value)}`"


def _type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in WORDS:
        return WORDS[hint]
    if origin is typing.Literal:
        return ", ".join(f"`{format_value(choice)}`" for choice in arguments)
    if origin in (UnionType, typing.Union):
        return " or ".join(dict.fromkeys(_type(part) for part in arguments if part is not NoneType))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_type(arguments[0])}"
        return "list of " + ", ".join(_type(part) for part in arguments)
    if dataclasses.is_dataclass(hint):
        return "tables"
    if "Mapping" in str(origin):
        return "table"
    return str(hint)


def _text(lines: Any) -> str:
    return "\n".join(lines).strip() + "\n"


def pages() -> dict[str, str]:
    """Return the text of every generated page by its path in docs/reference."""
    settings = {"recipe.md": recipe_page(), "plan.md": plan_page(), "cluster.md": cluster_page()}
    settings["pool.md"] = pool_page()
    python = {f"python/{name}": text for name, text in python_pages().items()}
    schema = json.dumps(plan_schema(), indent=2) + "\n"  # as `weft plan --schema` prints it
    return {**settings, "plan.schema.json": schema, "command-line.md": command_page(), **python}


def main() -> None:
    (FOLDER / "python").mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
