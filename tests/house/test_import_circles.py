"""No file of Weft needs itself, not even for a type: imports inside functions and under `if TYPE_CHECKING` count, too,
which import-linter's layers do not order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from pages import ROOT


@pytest.fixture(scope="module")
def floors() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "docs"))
    import floors

    yield floors
    sys.path.remove(str(ROOT / "docs"))


def test_no_file_needs_itself(floors: ModuleType) -> None:
    files = floors.source_files()
    run, typed = floors.import_graph(files), floors.import_graph(files, types=True)
    assert 1_000 < sum(map(len, run.values())) < sum(map(len, typed.values())), (
        "the imports are seen, and those of types"
    )
    assert not (circles := floors.circles(typed)), "\n".join(map(" ".join, circles))


def test_circles_are_found(floors: ModuleType) -> None:
    assert floors.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"d"}}) == [["b", "c"], ["d", "e"]]
    assert not floors.circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})
