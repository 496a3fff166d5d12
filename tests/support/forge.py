"""Changes to JSON documents as somebody would make them who knows the format: seeded, one field at a time."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.run.checkpoint._format import digest_of

Place = tuple[str | int, ...]


def deep(levels: int) -> Any:
    found: Any = 0
    for _ in range(levels):
        found = [found]
    return found


VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        2**31,
        2**62,
        2**63,
        10**39,
        10**50,
        1.5,
        -0.0,
        1e300,
        math.nan,
        math.inf,
        -math.inf,
    ),
    *(
        "",
        "x",
        "0",
        "NaN",
        "../x",
        "/etc/passwd",
        "..\\x",
        "C:\\x",
        "a/b",
        "\0",
        "\ud800",
        "é" * 300,
        "0x10",
        " 12",
        "1_0",
    ),
    *([], {}, [0], [-1], [2**61, 2**61], [0, 2**61, 0, 2**61], {"a": 1}, deep(70), deep(150), ["x"], [[]], [{}]),
)


def fields(document: Any, path: Place = ()) -> Iterator[Place]:
    """Every place in a document."""
    if path:
        yield path
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, value in items:
        yield from fields(value, (*path, name))


def forgeries(document: Any, seed: int, per_field: int) -> Iterator[tuple[str, Any]]:
    """Changed copies of a document with what was done: `per_field` drawn changes of every field."""
    draw = random.Random(seed)
    places = list(fields(document))
    for path in places:
        for _ in range(per_field):
            yield _forge(document, path, draw, places)


def forge_one(document: Any, draw: random.Random) -> tuple[str, Any]:
    """A changed copy of a document, with what was done to one drawn field."""
    places = list(fields(document))
    return _forge(document, draw.choice(places), draw, places)


def _forge(document: Any, path: Place, draw: random.Random, places: list[Place]) -> tuple[str, Any]:
    changed = copy.deepcopy(document)
    parent = _at(changed, path[:-1])
    how = draw.choice(("set", "set", "set", "near", "swap", "remove", "add", "repeat"))
    old = parent[path[-1]]
    if how == "set":
        parent[path[-1]] = copy.deepcopy(draw.choice(VALUES))
    elif how == "near":
        parent[path[-1]] = _near(old, draw)
    elif how == "swap":
        other = _at(changed, draw.choice(places))
        parent[path[-1]] = copy.deepcopy(other)
    elif how == "remove":
        del parent[path[-1]]
    elif how == "add" and isinstance(parent, dict):
        parent["unknown"] = copy.deepcopy(draw.choice(VALUES))
    elif isinstance(parent, list):
        parent.insert(path[-1], copy.deepcopy(old))
    return f"{how} {path}: {old!r:.60} → {parent!r:.160}", changed


def _near(old: Any, draw: random.Random) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return draw.choice((old + 1, old - 1, old * 2, -old, float(old), str(old)))
    if isinstance(old, str) and old:
        return draw.choice((old[:-1], old + "0", old.upper(), f"{old}/..", old[::-1]))
    return [old]


def _at(document: Any, path: Place) -> Any:
    for step in path:
        document = document[step]
    return document


def text_of(document: Any) -> bytes:
    """As JSON, also where JSON has no such value."""
    return json.dumps(document).encode()


def write_forged(folder: Path, index: bytes | None, manifest: Any) -> None:
    """Put an index and a manifest in place, with the digests that fit them."""
    if index is not None:
        (folder / "rank-00000.json").write_bytes(index)
        manifest["indexes"][0].update(size_bytes=len(index), digest=digest_of(index))
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    (folder / "manifest.json").write_bytes(text_of({"digest": digest_of(canonical.encode()), "manifest": manifest}))
