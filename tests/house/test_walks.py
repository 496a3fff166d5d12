"""The walks of docs/architecture.md lead through the source: files and names exist, and no wing is visited twice."""

from __future__ import annotations

import ast
import re

import pytest
from pages import ROOT

PAGE = ROOT / "docs" / "architecture.md"
STEP = re.compile(r"^\| (\w+) \| `(src/weft/(\w+)/[\w/]+\.py)` \| `(\w+)` \|", re.M)
WALKS = PAGE.read_text(encoding="utf-8").split("\n## Walks\n")[1].split("\n## ")[0].split("\n### ")[1:]


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.partition("\n")[0])
def test_a_walk_leads_on(walk: str) -> None:
    steps = STEP.findall(walk)
    assert len(steps) == walk.count("\n| ") - 1, "a row that is no step"
    for wing, path, folder, name in steps:
        assert wing == folder, path
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}, path
    wings = [wing for wing, *_ in steps]
    left = [wing for wing, following in zip(wings, wings[1:], strict=False) if wing != following]
    assert len({*left, wings[-1]}) == len(left) + 1, f"returns to a wing: {wings}"


def test_there_are_the_walks_that_a_reader_needs() -> None:
    titles = [walk.partition("\n")[0] for walk in WALKS]
    assert titles == ["A batch", "A gradient", "A setting", "A model's shape", "A failure"]
