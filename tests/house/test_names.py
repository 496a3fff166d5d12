"""One word for one thing: classes that share no name, docstrings that stand alone, doors that one can look through."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PACKAGE_INITS = [path for path in SOURCES if path.name == "__init__.py"]

FRAGMENTS = re.compile(
    r"(?:"
    r"About|Above|Across|After|Against|Along|Among|Around|As|At|Before|Behind|Below|Beneath|"
    r"Beside|Between|Beyond|By|During|For|From|In|Inside|Into|Like|Near|Of|Off|On|Onto|Outside|"
    r"Over|Per|Since|So|Than|That|Through|Throughout|To|Toward|Towards|Under|Until|Up|Upon|Via|"
    r"Which|Who|Whom|Whose|With|Within|Without"
    r")\b"
)
"""First words of a docstring that only continues what stands before it, which a hover does not show."""

MOST_EXPORTS, MEDIAN_EXPORTS = 40, 25
MOST_INSIDE = 55
"""Files outside of the source that may import private modules: to be lowered."""
WIDE_DOORS = {"src/weft/planning/price": 58, "src/weft/config/plan": 56}
"""Packages that export more: how many at most, to be lowered."""


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def public_classes() -> dict[str, list[str]]:
    """Name → files of every class without an underscore, at the top of a module."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(relative(path))
    return homes


def attribute_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every string that documents a field, a constant or a property."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, after in zip(body, body[1:], strict=False):
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                text = getattr(after.value, "value", None)
                if isinstance(text, str):
                    yield after.lineno, text
        if isinstance(node, ast.FunctionDef) and any("property" in ast.unparse(way) for way in node.decorator_list):
            yield node.lineno, ast.get_docstring(node) or ""


def is_fragment(text: str) -> bool:
    return FRAGMENTS.match(text.strip()) is not None


def exports(path: Path) -> list[str]:
    """Names that a package re-exports: `from weft.x._y import Name as Name`."""
    return [
        alias.name
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]


def test_no_two_public_classes_share_a_name() -> None:
    shared = {name: homes for name, homes in public_classes().items() if len(homes) > 1}
    assert not shared, f"one name, several classes: {shared}"


def test_attribute_docstrings_stand_alone() -> None:
    """A hover shows the docstring without the class around it: it begins with what the value is."""
    fragments = [
        f"{relative(path)}:{line} {text[:60]!r}"
        for path in SOURCES
        for line, text in attribute_docstrings(tree_of(path))
        if is_fragment(text)
    ]
    assert not fragments, "\n".join(fragments)


@pytest.mark.parametrize(("text", "expected"), [("Of a full one.", True), ("Peak of the rank.", False), ("", False)])
def test_the_check_of_docstrings_itself_sees(text: str, expected: bool) -> None:
    (found,) = attribute_docstrings(ast.parse(f"x: int = 0\n'''{text}'''"))
    assert is_fragment(found[1]) is expected


def test_doors_are_narrow() -> None:
    counts = {relative(path.parent): len(exports(path)) for path in PACKAGE_INITS}
    wide = {package: count for package, count in counts.items() if count > WIDE_DOORS.get(package, MOST_EXPORTS)}
    assert not wide, f"packages that export too many names: {wide}"
    doors = [count for count in counts.values() if count]
    assert statistics.median(doors) <= MEDIAN_EXPORTS, sorted(Counter(doors).items())


def private_imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a file imports from a private module of Weft's."""
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("weft"):
            continue
        assert node.module is not None
        for alias in node.names:
            if any(part.startswith("_") for part in (*node.module.split("."), alias.name)):
                yield node.module, alias.name


def test_tests_go_through_public_doors() -> None:
    """What a package exports is imported from the package; what it does not, by few."""
    doors = {
        (node.module, alias.name): ".".join(path.parent.relative_to(ROOT / "src").parts)
        for path in PACKAGE_INITS
        for node in tree_of(path).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    users = [path for folder in ("tests", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    private = {relative(path): list(private_imports(path)) for path in users}
    around = [
        f"{path}: import {name} from {doors[module, name]}, not from {module}"
        for path, imports in private.items()
        for module, name in imports
        if (module, name) in doors
    ]
    assert not around, "\n".join(around)
    inside = [path for path, imports in private.items() if imports]
    assert len(inside) <= MOST_INSIDE, f"{len(inside)} files import private modules: {inside}"
