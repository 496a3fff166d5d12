"""`weft comm draw`: text and picture of every algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli import run
from weft.comm.algorithms import ALGORITHMS


def test_text_of_a_ring(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["comm", "draw", "--algorithm", "ring", "--processes", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ring all_reduce over 4 ranks, as the ranks are numbered"
    assert "cost      6 rounds; a rank sends up to 6 messages and 1.5 × the buffer" in lines
    assert "round 1   reduce-scatter              0→1 [3]  1→2 [0]  2→3 [1]  3→0 [2]" in lines
    assert lines[-1].split() == ["round", "6", "all-gather", "0→1", "[2]", "1→2", "[3]", "2→3", "[0]", "3→0", "[1]"]


def test_a_cluster_gives_order_nodes_and_grid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["comm", "draw", "--algorithm", "hierarchical+tree", "--cluster", "2x4xh100"]) == 0
    text = capsys.readouterr().out
    assert "nodes     4 4 ranks" in text
    assert "across nodes" in text
    cluster = tmp_path / "c.toml"
    assert run(["comm", "draw", "--algorithm", "hierarchical", "--processes", "5", "--nodes", "3,2"]) == 0
    assert "nodes     3 2 ranks" in capsys.readouterr().out
    cluster.write_text("nodes = 3\n")
    assert run(["comm", "draw", "--algorithm", "ring", "--cluster", str(cluster)]) == 2


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_picture_of_every_algorithm(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for collective in ALGORITHMS[name].collectives:
        path = tmp_path / f"{collective}.png"
        arguments = ["--collective", collective, "--processes", "7", "--pieces", "2", "--output", str(path)]
        assert run(["comm", "draw", "--algorithm", name, *arguments]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")
        assert f"picture   {path}" in capsys.readouterr().out


@pytest.mark.parametrize("members", ["1", "2"])
def test_the_smallest_groups(members: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "small.svg")
    assert run(["comm", "draw", "--algorithm", "tree", "--processes", members, "--output", path]) == 0
    assert f"over {members} rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithm", "rign", "--processes", "4"], "Did you mean ring?"),
        (["--algorithm", "ring"], "either --processes 8, or --cluster cluster.toml"),
        (["--algorithm", "ring", "--processes", "4", "--cluster", "8xh100"], "either --processes 8, or --cluster"),
        (["--algorithm", "ring", "--processes", "0"], "a group has at least one rank"),
        (["--algorithm", "ring", "--processes", "4", "--nodes", "2;2"], "--nodes 2;2: write the ranks of each node"),
        (["--algorithm", "ring", "--cluster", "8xh100", "--nodes", "4,4"], "--nodes goes with --processes"),
        (["--algorithm", "tree", "--processes", "4", "--collective", "all_gather"], "does not define all_gather"),
        (["--algorithm", "ring", "--processes", "65", "--output", "x.png"], "65 ranks do not fit in a picture"),
        (["--algorithm", "ring", "--processes", "4", "--output", "x.nope"], "x.nope cannot be drawn to"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["comm", "draw", *arguments]) == 2
    assert message in capsys.readouterr().err
