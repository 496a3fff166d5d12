"""No file of Weft needs itself: imports inside functions count too, which import-linter's layers do not order."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pages import ROOT


def _circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one circle in order; none where there is no circle."""
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if circle := visit(target, (*way, module)):
                return circle
        done.add(module)
        return []

    return next((circle for module in sorted(graph) if (circle := visit(module, ()))), [])


def test_no_file_needs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import floors

    graph = floors.import_graph(floors.source_files())
    assert sum(map(len, graph.values())) > 1_000, "the imports are seen"
    assert not (circle := _circle(graph)), " → ".join(circle)


def test_a_circle_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not _circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})
