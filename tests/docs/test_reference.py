"""The reference of settings is what the dataclasses say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["recipe.md", "plan.md", "cluster.md"])
def test_reference_is_current(name: str) -> None:
    expected = load_script().PAGES[name]()
    assert (ROOT / "docs" / "reference" / name).read_text() == expected, "run: python docs/make_reference.py"
