"""The drawing in docs/architecture.md is the house as it stands: packages on floors, each above all that it imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from pages import ROOT

MOST_FLOORS = 9
"""As many as the way of the data needs: small files, what a user writes, models and messages, techniques, looking and
planning, what runs a plan, what verifies it, and the ways in.  A new one needs a reason."""


@pytest.fixture(scope="module")
def drawn() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "docs"))
    import floors

    yield floors
    sys.path.remove(str(ROOT / "docs"))


def test_the_page_shows_the_imports_as_they_are(drawn: ModuleType) -> None:
    text = drawn.PAGE.read_text(encoding="utf-8")
    assert drawn.page(text) == text, "run python docs/floors.py"


def test_there_are_few_floors(drawn: ModuleType) -> None:
    assert max(drawn.floors(drawn.wing_graph()).values()) <= MOST_FLOORS


def test_rooms_that_need_one_another_are_named(drawn: ModuleType) -> None:
    with pytest.raises(ValueError, match="need one another: a, b"):
        drawn.floors({"a": {"b"}, "b": {"a"}, "c": set()})


def test_arrows_are_the_fewest_that_tell_the_same(drawn: ModuleType) -> None:
    graph = {"top": {"middle", "ground"}, "middle": {"ground"}, "ground": set[str]()}
    assert drawn.straight(graph) == {"top": ["middle"], "middle": ["ground"], "ground": []}
    assert drawn.floors(graph) == {"ground": 1, "middle": 2, "top": 3}
