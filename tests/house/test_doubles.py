"""What is known once is written once: models, tables, and the rule by which experts borrow their ranks."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import weft
from weft.model.profile.known import KNOWN_MODELS
from weft.model.profile.known._table import joined

SOURCES = Path(weft.__file__).parent


def _tables() -> Iterator[tuple[str, str]]:
    """Every module-level dictionary of four constants or more: what stands in it, and where."""
    for path in sorted(SOURCES.rglob("*.py")):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Dict) and len(value.keys) >= 4 and all(map(_is_plain, value.values)):
                yield ast.dump(value), f"{path.relative_to(SOURCES)}:{statement.lineno}"


def _is_plain(node: ast.expr) -> bool:
    return all(
        isinstance(each, ast.Constant | ast.Tuple | ast.UnaryOp | ast.USub | ast.Load) for each in ast.walk(node)
    )


def test_no_table_is_written_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for content, place in _tables():
        places[content].append(place)
    assert [where for where in places.values() if len(where) > 1] == []


def test_no_model_is_known_twice() -> None:
    """Tables are made of rows, of which a dict would keep the last without a word."""
    model = next(iter(KNOWN_MODELS.values()))
    with pytest.raises(AssertionError, match=model.sizes.name):
        joined(iter([model]), iter([replace(model, source="another")]))


def test_no_model_is_known_by_two_names() -> None:
    """The same sizes and the same count under two names are one model, unless the names say two generations."""
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, known in KNOWN_MODELS.items():
        sizes = known.sizes
        alike[
            (sizes.num_layers, sizes.hidden_size, sizes.num_heads, sizes.vocabulary_size, sizes.sequence_length,
             sizes.num_experts, known.parameters, known.source)
        ].append(name)  # fmt: skip
    twice = [names for names in alike.values() if len(names) > 1]
    generations = [["llama-3-8b", "llama-3.1-8b"], ["llama-3-70b", "llama-3.1-70b"]]
    assert [names for names in twice if names not in generations] == []
