"""Compressed gradients on ranks against one process that plays all of those ranks: the same codec, residuals and order.

A compression changes the mathematics, so the parity matrix cannot have it.  But it changes it in a way that is written
down, and that is what these cells hold the ranks to: first gradients, the losses and gradient norms of five steps,
final weights; with accumulation, a tied embedding, sizes that are multiples of nothing, and several buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import cells
import pytest
from compressed import ROWS, exact
from compressed_run import Mistake, OneProcess, compressed, run_ranks
from compressed_run import recipe as recipe_of
from parity_run import joined, judge
from pool import RankPool
from predicted import unlike_predicted

from weft.config.plan import Plan
from weft.config.recipe import COMPRESSIONS
from weft.model.build import build_model
from weft.model.description import facts_of
from weft.techniques.check import check_plan, runnability
from weft.techniques.compression.codecs import Frame
from weft.verify.dry_run import trace_sends
from weft.verify.numerics import Trial, assemble

CASES: Mapping[str, Mapping[str, Any]] = {
    "2 ranks": {"replicate": 2, "micro": 2},
    "3 ranks, zero 1": {"shard": 3, "zero": 1, "micro": 2},
    "4 ranks": {"replicate": 4, "micro": 1},
    "2 ranks, zero 2": {"shard": 2, "zero": 2, "micro": 3},
}
CELLS = [(case, codec) for case in CASES for codec in ROWS if not runnability(compressed(codec, **CASES[case]))]
"""1-bit Adam does not go with ZeRO-2."""
MISTAKES: Mapping[str, Mistake] = {
    "nothing is compressed": Mistake(exact=True),
    "nothing is owed": Mistake(forgets=True),
    "residuals are swapped": Mistake(swaps=True),
    "microbatches are lost": Mistake(drops=True),
}
TOLERANCE = "fp64"


@dataclass
class Runs:
    """The runs of each case, all codecs one after the other on the same ranks; made once."""

    ranks: RankPool
    _found: dict[str, list[dict[str, tuple[Trial, list[Frame]]]]] = field(default_factory=dict)

    def of(self, case: str, codec: str) -> tuple[list[Trial], list[Frame]]:
        if case not in self._found:
            plans = {name: compressed(name, **CASES[case]) for each, name in CELLS if each == case}
            for plan in plans.values():
                recipe = recipe_of(plan)
                check_plan(plan, recipe, facts_of(recipe), plan.mesh.world_size)
            self._found[case] = self.ranks.run(plans[codec].mesh.world_size, run_ranks, plans, timeout=240.0)
        mine = [rank[codec] for rank in self._found[case]]
        return [trial for trial, _ in mine], mine[0][1]

    def failures(self, case: str, codec: str, mistake: Mistake) -> list[str]:
        """In what the ranks differ from one process, which may make a mistake."""
        plan = compressed(codec, **CASES[case])
        trials, frames = self.of(case, codec)
        initial = {name.partition("/")[2]: tensor for name, tensor in _initial(trials).items()}
        row = replace(ROWS[codec], reduce=exact) if mistake.exact else ROWS[codec]
        wanted = OneProcess(plan, frames, initial, row, mistake).train()
        found = joined(trials, plan)
        found.state = {name: tensor for name, tensor in found.state.items() if name in wanted.state}
        return judge(wanted, found).failures(TOLERANCE)


def _initial(trials: list[Trial]) -> dict[str, Any]:
    return assemble([trial.initial for trial in trials])


@pytest.fixture(scope="module")
def runs(ranks: RankPool) -> Runs:
    return Runs(ranks)


def test_every_codec_has_a_row() -> None:
    def plan(codec: str) -> Plan:
        made = cells.plan(replicate=2)
        return replace(made, data_parallel=replace(made.data_parallel, compression=codec))

    assert set(ROWS) == {name for name in COMPRESSIONS if not runnability(plan(name))}


@pytest.mark.parametrize(("case", "codec"), CELLS)
def test_equals_one_process_that_plays_all_ranks(runs: Runs, case: str, codec: str) -> None:
    assert runs.failures(case, codec, Mistake()) == []


@pytest.mark.parametrize(("case", "codec"), CELLS)
def test_ranks_send_what_is_predicted(runs: Runs, case: str, codec: str) -> None:
    plan = compressed(codec, **CASES[case])
    blueprint = build_model(recipe_of(plan))
    trials, _ = runs.of(case, codec)
    assert unlike_predicted(recipe_of(plan), plan, blueprint, trace_sends(blueprint), trials) == []


@pytest.mark.parametrize(("case", "codec"), CELLS)
def test_the_cells_have_what_they_are_for(runs: Runs, case: str, codec: str) -> None:
    """Several buckets, the tied embedding in one of them, parts of unequal length, and more than one microbatch."""
    plan = compressed(codec, **CASES[case])
    _, frames = runs.of(case, codec)
    assert len(frames) > 1
    assert any(span.name == "embedding.weight" for frame in frames for span in frame.spans)
    assert any(frame.num_elements % (plan.mesh.data * 256) for frame in frames)
    assert min(plan.microbatch.shares(plan.mesh.data)) > 1


@pytest.mark.parametrize("codec", sorted(ROWS))
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(runs: Runs, mistake: str, codec: str) -> None:
    made, row = MISTAKES[mistake], ROWS[codec]
    if (made.forgets or made.swaps) and not row.has_feedback:
        assert runs.failures("2 ranks", codec, made) == [], "there is nothing to forget"
    elif made.swaps and row.is_linear:
        assert runs.failures("2 ranks", codec, made) == [], "only the sum of what is owed matters"
    else:
        assert runs.failures("2 ranks", codec, made)
