"""Descriptions as JSON: what has its default is left out, and alike blocks stand once."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from weft.config.document import plain, typed
from weft.model.description._description import Description
from weft.model.profile import Block


def to_json(description: Description) -> str:
    """Return the text of a description."""
    table = plain(description)
    kinds: dict[int, int] = {}
    stored: list[Any] = []
    for block, _ in description.profile.count_blocks():
        kinds[id(block)] = len(stored)
        stored.append(plain(block))
    order = [kinds[id(block)] for block in description.profile.blocks]
    table["profile"]["blocks"] = []
    return json.dumps({"description": table, "kinds": stored, "order": order}, sort_keys=True)


def of_json(text: str) -> Description:
    """Return the description that `to_json` wrote: equal, and alike blocks are one object again.

    Raises:
        ValueError: the text is not that of a description.
    """
    try:
        written = json.loads(text)
        kinds = [typed(Block, kind) for kind in written["kinds"]]
        description = typed(Description, written["description"])
        blocks = tuple(kinds[index] for index in written["order"])
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as problem:
        raise ValueError(f"this is no description: {type(problem).__name__}: {problem}") from None
    return dataclasses.replace(description, profile=dataclasses.replace(description.profile, blocks=blocks))
