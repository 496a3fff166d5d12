"""What ranks that share a sequence are priced at: a scheme whose kernel is the device's own, and those in parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.config.cluster import parse_cluster_spec
from weft.model.profile import profile_of_sizes
from weft.model.profile.known import known_model
from weft.planning.price import check_layout, predict
from weft.techniques.cost_terms import DATASHEET, WEFT, Layout

PROFILE = profile_of_sizes(replace(known_model("llama-3.1-8b").sizes, sequence_length=16_384))
NODE = parse_cluster_spec("8xh100")


def context_seconds(scheme: str, *, fused_parts: bool) -> float:
    stack = replace(WEFT, fused_parts=fused_parts)
    layout = Layout(context=8, context_scheme=scheme, zero=1, recompute="full")  # type: ignore[arg-type]
    return predict(PROFILE, NODE, layout, framework=stack, calibration=DATASHEET).time.context


def test_attention_in_parts_is_priced_as_it_runs():
    fused, written = (context_seconds("ring", fused_parts=whether) for whether in (True, False))
    assert fused < context_seconds("ulysses", fused_parts=False) < written
    assert context_seconds("ulysses", fused_parts=True) == context_seconds("ulysses", fused_parts=False)


def test_gathered_keys_cost_what_three_passes_do():
    """A gather in each direction and the sums that come back, none of it hidden; a ring hides what it can."""
    assert context_seconds("all_gather", fused_parts=True) > context_seconds("ring", fused_parts=True)


@pytest.mark.parametrize(("tensor", "context", "fits"), [(1, 8, True), (1, 16, True), (4, 4, True), (8, 8, False)])
def test_heads_that_ranks_cannot_share_make_no_layout(tensor: int, context: int, fits: bool):
    """32 heads, 8 of keys."""
    cluster = parse_cluster_spec("8x8xh100")
    layout = Layout(tensor=tensor, context=context, context_scheme="ulysses")
    assert (not [problem for problem in check_layout(PROFILE, cluster, layout) if "heads" in problem]) is fits


@pytest.mark.parametrize(("exchanging", "fits"), [(0, True), (2, True), (4, True), (8, False), (3, False)])
def test_heads_are_exchanged_among_neighbours_of_several_groups(exchanging: int, fits: bool):
    layout = Layout(context=8, context_scheme="usp", context_ulysses=exchanging, zero=1, recompute="full")
    problems = [problem for problem in check_layout(PROFILE, NODE, layout) if "usp" in problem or "heads" in problem]
    assert (not problems) is fits, problems
    if fits:
        ring, mixed = (
            predict(PROFILE, NODE, one, framework=WEFT, calibration=DATASHEET).time.context
            for one in (replace(layout, context_scheme="ring", context_ulysses=0), layout)
        )
        assert mixed > 0
        assert mixed != ring


def test_a_window_shows_less():
    sizes = replace(known_model("llama-3.1-8b").sizes, sequence_length=16_384, window=512)
    windowed = profile_of_sizes(sizes)
    layout = Layout(context=8, context_scheme="all_gather", zero=1, recompute="full")
    seconds = [
        predict(profile, NODE, layout, framework=WEFT, calibration=DATASHEET).time.context
        for profile in (PROFILE, windowed)
    ]
    assert seconds[1] < seconds[0] / 1.5
