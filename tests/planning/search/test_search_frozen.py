"""Models of which most is frozen: what the search finds, and what would not fit if all of it were trained."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from search_kit import all_layouts, best_by_brute_force, cluster_of, narrow, tiny

from weft.model.profile import profile_of_sizes
from weft.model.profile.known import known_model
from weft.planning.price import CostModel
from weft.planning.search import search, space_of
from weft.techniques.cost_terms import Layout
from weft.techniques.pipeline.schedules import SPLIT_BACKWARD


@pytest.mark.parametrize(("trained", "coded"), [(0.004, 0.0), (0.01, 0.97), (0.0, 0.0), (0.6, 0.0)])
def test_the_search_finds_what_brute_force_finds(trained: float, coded: float) -> None:
    profile = replace(tiny(), trained_share=trained, coded_share=coded, code_bytes=coded)
    cluster = cluster_of("2x2xh100", memory=0.04)
    space = narrow(space_of(profile, cluster, global_batch_size=6), contexts=(1,), schedules=("1f1b", "gpipe"))
    cost_model = CostModel(profile, cluster)
    base = replace(
        Layout(precision="bf16", fused_loss=True, gradient_bytes=4, master_bytes=12),
        trained_share=trained,
        coded_share=coded,
        code_bytes=coded,
    )
    best, count = best_by_brute_force(cost_model, space, 6, base)
    result = search(profile, cluster, global_batch_size=6, space=space, cost_model=cost_model)
    assert count > 100
    assert result.best[0].prediction.step_seconds == pytest.approx(best, rel=1e-9)


def test_adapters_fit_where_the_whole_model_cannot_be_trained() -> None:
    """Seven billion weights on one device: 16 bytes of states each would be 112 GB, in bf16 alone they are 14 GB."""
    profile, cluster = profile_of_sizes(known_model("llama-3-8b").sizes, 2048), cluster_of("1xh100", memory=0.5)
    space = narrow(space_of(profile, cluster, global_batch_size=1))
    assert not search(profile, cluster, global_batch_size=1, space=space).best
    frozen = replace(profile, trained_share=0.002)
    best = search(frozen, cluster, global_batch_size=1, space=space).best[0]
    assert best.layout.world_size == 1
    assert best.prediction.fits


def test_frozen_weights_cost_less_to_train_and_no_more_to_hold() -> None:
    """Drawn layouts: with fewer trained weights, or codes in place of numbers, no rank holds more and no step is
    longer.  A schedule that splits the backward is drawn up for passes that frozen weights do not have."""
    draw = random.Random(7)
    profile, cluster = tiny(), cluster_of("2x4xh100")
    cost_model = CostModel(profile, cluster)
    space = narrow(space_of(profile, cluster, global_batch_size=16), contexts=(1, 2))
    layouts = list(
        all_layouts(profile, cluster, space, 16, Layout(precision="bf16", gradient_bytes=4, master_bytes=12))
    )
    for layout in draw.sample([each for each in layouts if each.schedule not in SPLIT_BACKWARD], 40):
        shares = sorted((draw.random(), draw.random()))
        variants = [replace(layout, trained_share=share) for share in shares] + [layout]
        coded = replace(variants[0], coded_share=0.9, code_bytes=0.9 * draw.choice((0.5, 1.0)))
        prices = [cost_model.predict(each) for each in (coded, *variants)]
        peaks = [price.fullest.device for price in prices]
        seconds = [price.step_seconds for price in prices[1:]]
        assert layout.pipeline > 1 or peaks == sorted(peaks), layout  # stages are cut anew, for the time they take
        assert seconds == pytest.approx(sorted(seconds), rel=1e-12), layout
