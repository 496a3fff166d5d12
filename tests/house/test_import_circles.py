"""No file of Weft needs itself: imports inside functions count too, which import-linter's layers do not order."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def _tree(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a file runs, without what stands under `if TYPE_CHECKING`."""
    yield node
    checking = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    children: Iterable[ast.AST] = node.orelse if checking and isinstance(node, ast.If) else ast.iter_child_nodes(node)
    for child in children:
        yield from _tree(child)


def _files() -> Mapping[str, Path]:
    named: dict[str, Path] = {}
    for path in (SOURCE / "weft").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def _imported(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield (module, name) of a file's imports; no name for `import weft.x`."""
    for node in _tree(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert not node.level, f"{path}: a relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def _graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return module → the modules from whose files its imports come, past the doors that only pass a name on."""
    imports = {module: tuple(_imported(path)) for module, path in files.items()}
    passed = {
        (module, name): source
        for module, path in files.items()
        if path.name == "__init__.py"
        for source, name in imports[module]
        if name is not None and source in files
    }

    @cache
    def home(module: str, name: str | None) -> str:
        if name is not None and f"{module}.{name}" in files:
            return f"{module}.{name}"
        source = passed.get((module, name or ""))
        return module if source is None else home(source, name)

    return {
        module: {home(source, name) for source, name in found if source in files} - {module}
        for module, found in imports.items()
    }


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


def test_no_file_needs_itself() -> None:
    graph = _graph(_files())
    assert sum(map(len, graph.values())) > 1_000, "the imports are seen"
    assert not (circle := _circle(graph)), " → ".join(circle)


def test_a_circle_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not _circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})
