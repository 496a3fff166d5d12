"""Prices that recorded runs have corrected are bounded as others are: a search finds the best of all layouts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from brute_force import best_by_brute_force
from drawn_spaces import CORES, Drawn, drawn
from test_search_bounds import above, searched

from weft.planning.price import CostModel
from weft.techniques.cost_terms import DATASHEET, ComputeCorrection, Corrections


def corrected(case: Drawn, random: Random) -> Drawn:
    def factor() -> float:
        return random.choice((0.3, 0.7, 1.0, 1.6, 3.5))

    rows = [
        ComputeCorrection(
            precision=precision,
            cores=cores,
            products=factor(),
            convolutions=factor(),
            plain=factor(),
            copies=factor(),
            operator_seconds=random.choice((0.0, 2e-5)),
        )
        for precision in ("fp32", "bf16")
        for cores in (0.5, 1.0, 2.0)
    ]
    corrections = Corrections(
        compute=tuple(rows), communication=factor(), collective_seconds=random.choice((0.0, 1e-4)), optimizer=factor(),
        optimizer_seconds=random.choice((0.0, 2e-3)), step_seconds=1e-3, spread=0.08,
    )  # fmt: skip
    cost_model = CostModel(case.profile, case.cluster, calibration=replace(DATASHEET, corrections=corrections))
    return replace(case, cost_model=cost_model)


@pytest.mark.parametrize("seed", range(12))
def test_no_bound_is_above_a_corrected_price(seed: int) -> None:
    case = corrected(drawn(f"corrected {seed}", specs=CORES, most=400), Random(seed))
    assert not above(case), str(case)


@pytest.mark.parametrize("seed", range(12))
def test_a_search_finds_the_best_of_all_corrected_prices(seed: int) -> None:
    case = corrected(drawn(f"corrected best {seed}", specs=CORES, most=400), Random(seed))
    best = best_by_brute_force(case.cost_model, case.layouts, case.objective)
    assert searched(case) == pytest.approx(best.score, rel=1e-9), (str(case), best.layout)
