"""A few of the families of `make families`, drawn by a seed, under a few plans: equal, or refused by a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers
from benchmarks.families._cells import Cell, ways_of
from benchmarks.families._draw import Drawn, draw
from benchmarks.families._kinds import KINDS, families_of
from checking import on_ranks
from pool import RankPool

from weft.api import check_by
from weft.errors import WeftError

SEED = 7
COUNTS = {"decoder": 1, "encoder-decoder": 1, "vision": 1}
TRIED = ("data 2, ZeRO-1", "data 2, ZeRO-3", "tensor 2", "context 2")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[Drawn]]:
    transformers.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp("families")
    return folder, draw(SEED, folder, COUNTS)[0]


def test_every_kind_has_families_and_none_two_kinds() -> None:
    found = {kind: {family.model_type for family in families_of(kind)} for kind in KINDS}
    assert all(len(names) > 10 for names in found.values()), {kind: len(names) for kind, names in found.items()}
    text = [found[kind] for kind in ("decoder", "mixture", "recurrent", "encoder", "encoder-decoder")]
    assert sum(map(len, text)) == len(set().union(*text))


def test_the_draw_is_the_same_again(drawn: tuple[Path, Sequence[Drawn]], tmp_path: Path) -> None:
    assert draw(SEED, tmp_path, COUNTS)[0] == drawn[1]
    assert [one.kind for one in drawn[1]] == list(COUNTS)


@pytest.mark.parametrize("plan", TRIED)
@pytest.mark.parametrize("number", range(3))
def test_a_drawn_family(ranks: RankPool, drawn: tuple[Path, Sequence[Drawn]], number: int, plan: str) -> None:
    folder, families = drawn
    one = families[number]
    ways = ways_of(one, folder)
    try:
        report = check_by(on_ranks(ranks), ways.recipe, ways.plan(plan), processes=None, explain=False)
    except WeftError as refusal:
        cell = Cell("refused", str(refusal))
    else:
        cell = Cell("equal" if report.is_equal else "differs", str(report))
    assert cell.outcome in ("equal", "refused"), f"{one.name}: {cell.why}"
    assert cell.outcome == "equal" or plan in ("tensor 2", "context 2"), f"{one.name}: {cell.why}"
