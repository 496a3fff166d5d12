"""Draws the packages of Weft on floors, each above all that it imports, into docs/architecture.md.

    python docs/floors.py
    python docs/floors.py circles    # lists the files that need one another, by types too

A test compares the page with what this would write, so the drawing cannot go stale.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
PAGE = Path(__file__).parent / "architecture.md"
BEGIN, END = "<!-- drawn by docs/floors.py -->", "<!-- end of the drawing -->"

# ── the files and what each imports ───────────────────────────────────────────────────────────────────────────────────


def run_nodes(node: ast.AST, *, types: bool = False) -> Iterator[ast.AST]:
    """Yield what a file runs; with `types` also what stands under `if TYPE_CHECKING`."""
    yield node
    checking = not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    children: Iterable[ast.AST] = node.orelse if checking and isinstance(node, ast.If) else ast.iter_child_nodes(node)
    for child in children:
        yield from run_nodes(child, types=types)


def source_files() -> Mapping[str, Path]:
    """Return every module of Weft and its file."""
    named: dict[str, Path] = {}
    for path in (SOURCE / "weft").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def _imported(path: Path, *, types: bool) -> Iterator[tuple[str, str | None]]:
    """Yield (module, name) of a file's imports; no name for `import weft.x`."""
    for node in run_nodes(ast.parse(path.read_text(encoding="utf-8")), types=types):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert not node.level, f"{path}: a relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def import_graph(files: Mapping[str, Path], *, types: bool = False) -> dict[str, set[str]]:
    """Return module → the modules from whose files its imports come, past the doors that only pass a name on.

    Imports inside functions count, and with `types` those of types alone.
    """
    imports = {module: tuple(_imported(path, types=types)) for module, path in files.items()}
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


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the modules of each circle of imports (Tarjan's strongly connected components of two modules or more)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        open_.append(module)
        for need in sorted(graph.get(module, ())):
            if need not in order:
                visit(need)
                lowest[module] = min(lowest[module], lowest[need])
            elif need in open_:
                lowest[module] = min(lowest[module], order[need])
        if lowest[module] == order[module]:
            start = open_.index(module)
            members = open_[start:]
            del open_[start:]
            if len(members) > 1:
                found.append(sorted(members))

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return found


# ── wings: the packages of Weft ──────────────────────────────────────────────────────────────────────────────────────

SETTINGS_ONLY = re.compile(r"weft\.(config|comm)(\..+)? -> weft\.techniques\.\w+\.settings")
"""The one arrow up: a plan is made of the settings of techniques, each of which stands in its technique's folder."""


def wing_of(module: str) -> str:
    """Return the package of Weft that a module belongs to; empty for the door of Weft itself."""
    return module.split(".")[1] if "." in module else ""


def wing_graph() -> dict[str, set[str]]:
    """Return wing → the wings that its files import from, types too, but for `SETTINGS_ONLY`."""
    wings: dict[str, set[str]] = {}
    for module, needs in import_graph(source_files(), types=True).items():
        counted = {wing_of(need) for need in needs if not SETTINGS_ONLY.fullmatch(f"{module} -> {need}")}
        wings.setdefault(wing_of(module), set()).update(counted)
    return {wing: needs - {wing, ""} for wing, needs in wings.items() if wing}


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return package → floor: the lowest one above all that it imports; the ground is 1.

    Raises:
        ValueError: rooms that need one another have no floors.
    """
    found: dict[str, int] = {}
    while len(found) < len(graph):
        ready = {room for room, needs in graph.items() if room not in found and needs <= found.keys()}
        if not ready:
            raise ValueError(f"need one another: {', '.join(sorted(graph.keys() - found.keys()))}")
        found |= {room: 1 + max((found[need] for need in graph[room]), default=0) for room in ready}
    return found


def straight(graph: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return room → what it needs that nothing else it needs leads to: the fewest arrows that tell the same."""

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(graph[room]).union(*(below(need) for need in graph[room]))

    return {
        room: sorted(need for need in needs if not any(need in below(other) for other in needs))
        for room, needs in graph.items()
    }


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def words_of(path: Path) -> str:
    """Return what a module or package says of itself: the first sentence of its docstring."""
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.])\s+(?=[A-Z])", text)[0].rstrip(".")


def packages_of(wing: str) -> list[Path]:
    """Return the folders in a wing that are packages."""
    return sorted(path.parent for path in SOURCE.joinpath("weft", wing).glob("*/__init__.py"))


def _wrapped(text: str, first: int, others: int) -> list[str]:
    """Return the text in lines, indented by so many columns."""
    return textwrap.wrap(text, 112, initial_indent=" " * first, subsequent_indent=" " * others)


def drawing() -> str:
    """Return the floors as a text block, the top floor first: each wing, what it imports, and its packages."""
    graph = wing_graph()
    placed, arrows = floors(graph), straight(graph)
    lines: list[str] = []
    for number in range(max(placed.values()), 0, -1):
        for wing in sorted(wing for wing, floor in placed.items() if floor == number):
            needs = f"  ─► {', '.join(arrows[wing])}" if arrows[wing] else ""
            lines += textwrap.wrap(f"{number:2d}  {wing}{needs}", 120, subsequent_indent=" " * 8)
            lines += _wrapped(words_of(SOURCE / "weft" / wing), 6, 6)
            for path in packages_of(wing):
                lines += _wrapped(f"{path.name:15} {words_of(path)}", 8, 24)
    return "\n".join(["```text", *lines, "```"])


def page(text: str) -> str:
    """Return the page with the drawing as it is today."""
    before, found, rest = text.partition(BEGIN)
    assert found, f"{PAGE.name} has no line {BEGIN}"
    return f"{before}{BEGIN}\n\n{drawing()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["circles"]:
        print(*map(" ".join, circles(import_graph(source_files(), types=True))), sep="\n")
        sys.exit(0)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
