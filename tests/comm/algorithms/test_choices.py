"""Lists by size, the shortlist and kept tables: all that chooses without sending anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.comm.algorithms import (
    ALGORITHMS,
    BUILT_IN,
    ChoiceTable,
    Links,
    MethodCandidate,
    TableRow,
    decide,
    defines,
    find_table,
    fit_links,
    flat,
    format_size,
    keep_table,
    parse_choices,
    parse_size,
    predict,
    shortlist,
    stand_in,
    table_from_json,
    table_path,
    table_to_json,
)
from weft.errors import CollectiveError

LINKS = Links(latency=65e-6, per_byte=0.23e-9)


def table(choice: str = "ring", members: int = 4, nodes: tuple[int, ...] = (4,)) -> ChoiceTable:
    candidates = (
        MethodCandidate(name="backend", predicted_seconds=1e-3, measured_seconds=2e-3),
        MethodCandidate(name="ring", predicted_seconds=1e-3, measured_seconds=1e-3),
        MethodCandidate(name="tree", predicted_seconds=4e-3, note="predicted 4.0 × the cheapest"),
    )
    rows = (
        TableRow(collective="all_reduce", size_bytes=1 << 12, choice="backend", candidates=candidates),
        TableRow(collective="all_reduce", size_bytes=1 << 20, choice=choice, candidates=candidates),
    )
    return ChoiceTable(members=members, nodes=nodes, backend="gloo", links=LINKS, rows=rows)


def test_a_list_by_size() -> None:
    choices = parse_choices("tree:0-32K;direct:32K-8M;ring:8M-max")
    sizes = (0, 32767, 32768, (8 << 20) - 1, 8 << 20, 1 << 40)
    assert [choices.algorithm_for(size) for size in sizes] == ["tree", "tree", "direct", "direct", "ring", "ring"]
    assert choices.names == ("tree", "direct", "ring")


def test_order_does_not_matter_and_one_entry_takes_the_rest() -> None:
    assert parse_choices("ring:8M-max;tree:0-32K;direct:32K-8M") == parse_choices(
        "tree:0-32K;direct:32K-8M;ring:8M-max"
    )
    choices = parse_choices("tree:4K-32K;backend;ring:1G-max")
    sizes = (0, 4095, 4096, 32768, 1 << 30)
    assert [choices.algorithm_for(size) for size in sizes] == ["backend", "backend", "tree", "backend", "ring"]
    assert parse_choices("hierarchical+tree").algorithm_for(7) == "hierarchical+tree"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring;", 'is neither "auto" nor "measured" nor a list by size'),
        ("ring:8-", 'is neither "auto" nor "measured" nor a list by size'),
        ("", 'is neither "auto" nor "measured" nor a list by size'),
        ("rings", "names the algorithm rings, which does not exist. Did you mean ring?"),
        ("xyz", "which does not exist. There are backend, exchange, ring, "),
        ("hierarchical+tre", "Did you mean tree?"),
        ("tree:0-32K", 'says nothing about 32K-max. Add "backend:32K-max"'),
        ("tree:4K-32K;ring:32K-max", "says nothing about 0-4K."),
        ("tree:0-1K;ring:2K-max", "says nothing about 1K-2K."),
        ("tree:0-32K;ring:16K-max", "gives 16K and more to both tree and ring: ranges must not overlap."),
        ("tree:0-max;ring:16K-max", "gives 16K and more to both tree and ring"),
        ("tree:32K-32K;ring", "has the empty range tree:32K-32K"),
        ("ring;tree", "gives the rest to both ring and tree."),
        ("auto;ring:0-4K", 'mixes "auto" with others'),
    ],
)
def test_a_wrong_list_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(CollectiveError) as caught:
        parse_choices(text)
    assert message in str(caught.value)


@given(st.lists(st.integers(1, 1 << 34), min_size=1, max_size=6, unique=True), st.integers(0, 1 << 35))
def test_spans_lie_side_by_side(edges: list[int], size: int) -> None:
    edges = sorted(edges)
    names = ["tree", "direct", "ring", "bruck", "one_shot", "double_tree", "torus"]
    ends = [*map(format_size, edges), "max"]
    starts = ["0", *ends[:-1]]
    text = ";".join(f"{n}:{a}-{b}" for n, a, b in zip(names, starts, ends, strict=False))
    expected = names[sum(edge <= size for edge in edges)]
    assert parse_choices(text).algorithm_for(size) == expected


def test_sizes_read_as_they_are_written() -> None:
    assert [parse_size(text) for text in ("4096", "32K", "8m", "1G")] == [4096, 32768, 8 << 20, 1 << 30]
    assert [format_size(size) for size in (0, 1000, 4096, 8 << 20, 3 << 30)] == ["0", "1000", "4K", "8M", "3G"]
    for text in ("", "0", "4.5M", "-1", "many"):
        with pytest.raises(CollectiveError, match="is no size"):
            parse_size(text)


def test_what_stands_in_where_a_way_lacks_a_collective() -> None:
    assert stand_in("ring", "reduce_scatter") == ("ring", "reduce_scatter")
    assert stand_in("tree", "reduce_scatter") == ("tree", "all_reduce")
    assert stand_in("tree", "all_gather") == ("exchange", "all_gather")
    assert stand_in("exchange", "all_reduce") is None
    assert stand_in("scatter", "all_reduce") is None


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-6))
def test_a_line_through_exact_times_is_found(latency: float, per_byte: float) -> None:
    found = fit_links([(size, latency + size * per_byte) for size in (1 << 10, 1 << 16, 1 << 20)])
    if latency > 0.51 * (latency + 1024 * per_byte):
        assert found == pytest.approx((latency, per_byte), rel=1e-5)
    assert found[0] > 0
    assert found[1] >= 0


def test_a_line_through_noise_stays_possible() -> None:
    latency, per_byte = fit_links([(1 << 10, 9e-4), (1 << 16, 2e-4), (1 << 20, 1e-4)])
    assert latency == 1e-4
    assert per_byte == 0
    latency, per_byte = fit_links([(1 << 10, 5e-5), (1 << 16, 1e-3), (1 << 20, 3e-3)])
    assert latency >= 2.5e-5
    assert per_byte > 0
    with pytest.raises(CollectiveError, match="at least 2 sizes"):
        fit_links([(1 << 10, 1e-3)])


@pytest.mark.parametrize("members", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("size", [1 << 10, 1 << 18, 1 << 26])
def test_a_shortlist_has_the_cheapest_and_all_that_are_close(members: int, size: int) -> None:
    predicted = predict("all_reduce", size, flat(members), LINKS)
    listed = shortlist(predicted)
    assert {each.name for each in listed} == predicted.keys()
    assert [each.predicted_seconds for each in listed] == sorted(predicted.values())
    kept = [each for each in listed if not each.note]
    own = [each for each in kept if each.name not in BUILT_IN]
    assert len(own) >= 3
    assert "backend" in {each.name for each in kept}
    assert "exchange" not in predicted
    cheapest = own[0].predicted_seconds
    for each in listed:
        if each.note:
            assert each.predicted_seconds > 1.25 * cheapest
            assert f"{each.predicted_seconds / cheapest:.1f} ×" in each.note


def test_rings_are_measured_where_formulas_cannot_tell_them_apart() -> None:
    kept = {each.name for each in shortlist(predict("all_reduce", 64 << 20, flat(4), LINKS)) if not each.note}
    assert {"ring", "direct", "halving_doubling"} <= kept
    pruned = {each.name for each in shortlist(predict("all_reduce", 64 << 20, flat(4), LINKS)) if each.note}
    assert {"tree", "one_shot"} <= pruned


def test_hierarchies_are_offered_between_nodes_and_tori_on_tori() -> None:
    inside = predict("all_reduce", 1 << 20, flat(4), LINKS)
    between = predict("all_reduce", 1 << 20, flat(4, nodes=(2, 2)), LINKS)
    assert not any(name.startswith("hierarchical") for name in inside)
    assert {"hierarchical", "hierarchical+tree"} <= between.keys()
    assert "torus" in predict("all_reduce", 1 << 20, flat(4), LINKS, topology="torus")
    slow = Links(latency=1e-4, per_byte=8e-9, inner_latency=1e-5, inner_per_byte=1e-10)
    best = shortlist(predict("all_reduce", 16 << 20, flat(8, nodes=(4, 4)), slow))[0]
    assert best.name.startswith("hierarchical")


def test_every_candidate_does_the_collective() -> None:
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        for name in predict(collective, 1 << 20, flat(6, nodes=(3, 3)), LINKS):
            assert defines(name, collective)
    assert set(BUILT_IN).isdisjoint(ALGORITHMS)


def timed(**seconds: float) -> list[MethodCandidate]:
    return [
        MethodCandidate(name=name, predicted_seconds=1.0, measured_seconds=value) for name, value in seconds.items()
    ]


def test_the_fastest_is_chosen_unless_the_usual_is_as_good() -> None:
    assert decide(timed(backend=1.0, ring=0.5, tree=0.7), "backend") == "ring"
    assert decide(timed(backend=1.0, ring=0.96), "backend") == "backend"
    assert decide(timed(tree=2.0, ring=2.0), "backend") == "ring"
    with pytest.raises(CollectiveError, match="nothing was measured"):
        decide([MethodCandidate(name="ring", predicted_seconds=1.0)], "backend")


def test_the_nearest_measured_size_decides() -> None:
    found = table()
    assert [found.choose("all_reduce", size) for size in (0, 1 << 15, 1 << 17, 1 << 40)] == [
        "backend", "backend", "ring", "ring",
    ]  # fmt: skip
    assert found.choose("all_gather", 1 << 20) is None


def test_a_table_is_kept_and_found_again(tmp_path: Path) -> None:
    path = keep_table(table(), folder=tmp_path / "new" / "folder")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert find_table(4, (4,), "gloo", folder=path.parent) == table()
    assert find_table(4, (2, 2), "gloo", folder=path.parent) is None
    assert find_table(3, (3,), "gloo", folder=path.parent) is None
    assert find_table(4, (4,), "other", folder=path.parent) is None
    keep_table(table("backend"), folder=path.parent)
    assert find_table(4, (4,), "gloo", folder=path.parent) == table("backend")


def changed(**changes: object) -> str:
    return json.dumps({**json.loads(table_to_json(table())), **changes})


ROW = json.loads(table_to_json(table()))["rows"][0]
DAMAGED = [
    "",
    "{",
    "[]",
    "null",
    "7",
    table_to_json(table())[:-20],
    changed(format=0),
    changed(members="4"),
    changed(members=-4),
    changed(nodes=3),
    changed(links={"latency": "fast"}),
    changed(links={"speed": 1.0}),
    changed(rows=[{}]),
    changed(rows=[{**ROW, "choice": "rings"}]),
    changed(rows=[{**ROW, "choice": "exchange"}]),
    changed(rows=[{**ROW, "collective": "all_to_all"}]),
    changed(rows=[{**ROW, "collective": ["all_reduce"]}]),
    changed(rows=[{**ROW, "size_bytes": 0}]),
    changed(rows=[{**ROW, "candidates": [{"name": "ring"}]}]),
    "[" * 100_000,
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_table_counts_as_none(text: str, tmp_path: Path) -> None:
    with pytest.raises(CollectiveError):
        table_from_json(text)
    path = table_path(4, (4,), "gloo", folder=tmp_path)
    path.write_text(text)
    assert find_table(4, (4,), "gloo", folder=tmp_path) is None


def test_what_is_no_text_or_no_file_counts_as_none(tmp_path: Path) -> None:
    path = table_path(4, (4,), "gloo", folder=tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    assert find_table(4, (4,), "gloo", folder=tmp_path) is None
    path.write_text(" " * (2 << 20) + table_to_json(table()))
    assert find_table(4, (4,), "gloo", folder=tmp_path) is None
    path.unlink()
    path.mkdir()
    assert find_table(4, (4,), "gloo", folder=tmp_path) is None


def test_a_table_of_another_group_under_this_name_counts_as_none(tmp_path: Path) -> None:
    table_path(4, (4,), "gloo", folder=tmp_path).write_text(table_to_json(table(members=2, nodes=(2,))))
    assert find_table(4, (4,), "gloo", folder=tmp_path) is None


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CollectiveError, match="cannot be written"):
        keep_table(table(), folder=tmp_path / "file")
