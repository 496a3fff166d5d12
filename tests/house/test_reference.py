"""The reference is what the dataclasses, the parsers and the docstrings say."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from pages import fences

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
GENERATED = [*sorted(REFERENCE.rglob("*.md")), *REFERENCE.glob("*.json")]
WRITTEN_BY_HAND = {"compositions.md"}


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """What `python docs/make_reference.py` would write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        return importlib.import_module("make_reference").pages()


def test_every_page_is_made(made: dict[str, str]) -> None:
    assert {str(page.relative_to(REFERENCE)) for page in GENERATED} - WRITTEN_BY_HAND == set(made)


def test_reference_is_current(made: dict[str, str]) -> None:
    stale = [name for name, text in made.items() if (REFERENCE / name).read_text() != text]
    assert not stale, f"{stale}: run python docs/make_reference.py"


def test_what_examples_import_is_in_the_reference(made: dict[str, str]) -> None:
    """Who copies an example finds every name of Weft in it on a page."""
    for fence in fences("python"):
        for node in ast.walk(ast.parse(fence.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "weft":
                page = made.get(f"python/{node.module}.md", "")
                missing = [alias.name for alias in node.names if f"[`{alias.name}`](" not in page]
                assert not missing, f"{fence}: {missing} of {node.module}; see MODULES in docs/python_reference.py"


def test_every_command_and_option_is_in_the_reference(made: dict[str, str]) -> None:
    from weft.cli import build_app

    page, app = made["command-line.md"], build_app()
    for name in (name for name in app if not name.startswith("-") and app[name].show):
        assert f"`weft {name}" in page
    # `*` stands for options in a class of their own, which follow it.
    names = [argument.names[0] for argument in app["plan"].assemble_argument_collection()]
    assert len(names) > 20
    assert all(f"`{name}`" in page for name in names if name != "*")
