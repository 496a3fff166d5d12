"""How algorithms lie on clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_simulator import simulate

from weft.comm.algorithms import ALGORITHMS, arrange, build_schedule, snake
from weft.config.cluster import LinkTier, parse_cluster_spec


def torus(*shape: int) -> LinkTier:
    count = 1
    for size in shape:
        count *= size
    return LinkTier(
        name="mesh", devices=count, latency_seconds=1e-6, bandwidth_bytes_per_second=1e11, topology="torus", shape=shape
    )


@pytest.mark.parametrize("shape", [(4,), (2, 3), (4, 4), (3, 5), (2, 3, 4), (4, 2, 2)])
def test_a_snake_visits_every_place_and_steps_to_neighbours(shape: tuple[int, ...]) -> None:
    order = snake(shape)
    places: list[tuple[int, ...]] = []
    for place in order:
        at: list[int] = []
        for size in reversed(shape):
            place, index = divmod(place, size)
            at.insert(0, index)
        places.append(tuple(at))
    assert len(set(places)) == len(places)
    for before, after in zip(places, places[1:], strict=False):
        assert sum(abs(a - b) for a, b in zip(before, after, strict=True)) == 1


def test_nodes_are_machines_or_what_the_innermost_links_join() -> None:
    assert arrange("hierarchical", parse_cluster_spec("2x8xh100")).nodes == (8, 8)
    assert arrange("hierarchical", parse_cluster_spec("7x8xh100+1x6xh100")).nodes == (8,) * 7 + (6,)
    one = parse_cluster_spec("8xcpu")
    pair = LinkTier(name="cache", devices=3, latency_seconds=1e-7, bandwidth_bytes_per_second=1e10)
    split = replace(one, links=(pair, replace(pair, name="host", devices=8)))
    assert arrange("hierarchical", split).nodes == (3, 3, 2)
    assert arrange("hierarchical", one).nodes == (8,)


def test_the_grid_is_the_torus_or_nodes_times_devices() -> None:
    assert arrange("torus", parse_cluster_spec("4x8xh100")).shape == (4, 8)
    mesh = replace(parse_cluster_spec("12xcpu"), links=(torus(3, 4),))
    assert arrange("torus", mesh).shape == (3, 4)
    assert arrange("ring", mesh).order == (0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11)
    assert "snake order through the 3×4 torus" in arrange("ring", mesh).note
    assert arrange("torus", parse_cluster_spec("7x8xh100+1x6xh100")).shape == (2, 31)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_works_on_every_kind_of_cluster(name: str) -> None:
    cube = replace(parse_cluster_spec("24xcpu"), links=(torus(2, 3, 4),))
    for cluster in (parse_cluster_spec("2x4xh100"), parse_cluster_spec("2x4xh100+1x3xh100"), cube):
        place, n = arrange(name, cluster), cluster.num_devices
        for kind in ALGORITHMS[name].collectives:
            simulate([build_schedule(name, kind, rank, n, arrangement=place, root=1) for rank in range(n)], 5000)
