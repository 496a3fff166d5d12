"""The draw of mutants: the same for a seed, only what computes, and the checkout untouched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from mutants import ROOMS, Mutant, draw, mutants_of, sources  # noqa: E402 - beside this file

pytest.importorskip("universalmutator")

SOURCE = '''"""A module: 1 + 1."""


def scaled(values: list[int] | None, factor: int = 2) -> list[int]:
    """Return 2 * values."""
    if values is None:
        raise ValueError(f"values + {factor} is None")
    assert factor > 0, "factor - 1 is below 0"
    # 3 * 4
    return [value * factor for value in values]
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of one small file in one of the rooms, and empty others."""
    for room in ROOMS:
        path = tmp_path / room
        if path.suffix:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        else:
            path.mkdir(parents=True)
    (tmp_path / ROOMS[0] / "scaled.py").write_text(SOURCE)
    return tmp_path


def all_mutants(tree: Path) -> list[Mutant]:
    path = tree / ROOMS[0] / "scaled.py"
    return [mutant for line in (6, 7, 8, 10) for mutant in mutants_of(tree, path, line)]


def test_only_what_computes_is_mutated(tree: Path) -> None:
    found = all_mutants(tree)
    changed = {mutant.line: {m.after.strip() for m in found if m.line == mutant.line} for mutant in found}
    assert "return [value + factor for value in values]" in changed[10]
    assert "pass" in changed[6] | changed[8]
    assert all("raise ValueError" not in text for text in changed[7])  # dropped it may be, its message stays
    assert all(text == "pass" or "factor - 1 is below 0" in text for text in changed[8] if "assert factor > 0" in text)
    assert not {1, 4, 5, 9} & changed.keys()
    for mutant in found:
        compile(SOURCE.replace(mutant.before, mutant.after), "mutant", "exec")


def test_a_seed_always_draws_the_same(tree: Path) -> None:
    executed = {f"{ROOMS[0]}/scaled.py": range(6, 11)}
    first = draw(tree, executed, 3, seed=5)
    assert first == draw(tree, executed, 3, seed=5)
    assert len({mutant.statement for mutant in first}) == len(first)
    assert draw(tree, {}, 3, seed=5) == []
    assert any(draw(tree, executed, 3, seed=seed) != first for seed in range(6, 20))


def test_lines_that_no_case_runs_are_left_alone(tree: Path) -> None:
    executed = {f"{ROOMS[0]}/scaled.py": [10]}
    assert {mutant.line for mutant in draw(tree, executed, 9, seed=0)} == {10}


def test_a_mutant_is_written_into_a_copy_and_taken_back(tree: Path) -> None:
    path = tree / ROOMS[0] / "scaled.py"
    mutant = all_mutants(tree)[0]
    assert mutant.apply(tree) == SOURCE
    assert path.read_text() != SOURCE
    with pytest.raises(AssertionError, match="has changed since the draw"):
        mutant.apply(tree)
    path.write_text(SOURCE)


def test_the_rooms_exist() -> None:
    root = HERE.parents[1]
    found = [str(path.relative_to(root)) for path in sources(root)]
    assert "src/weft/techniques/data/gradient_reducer.py" in found
    assert "src/weft/run/engine/_step.py" in found
    assert len(found) > 30
