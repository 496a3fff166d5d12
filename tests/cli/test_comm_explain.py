"""`weft comm explain`: measured once, kept, shown again, and told apart from what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli import run
from weft.comm.algorithms import find_table


def test_it_measures_keeps_and_shows_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert run(["comm", "explain", "--processes", "2", "--size", "16M", "--size", "4K", "--size", "1K"]) == 0
    text = capfd.readouterr()
    lines = text.out.splitlines()
    assert lines[0] == "ranks     2 on 1 node, backend weft"
    assert lines[1].startswith("links     ")
    assert [line.partition(":")[0] for line in lines if " of " in line and line[0] != " "] == [
        f"{kind} of {size}" for kind in ("all_reduce", "reduce_scatter", "all_gather") for size in ("1K", "4K", "16M")
    ]
    assert sum("→ " in line for line in lines) == 9
    # On a machine so busy that no bandwidth can be told, nothing is left out by its prediction.
    assert "× the cheapest" in text.out or "bandwidth beyond measure" in text.out
    assert "all_reduce of 1K: " in text.err
    kept = find_table(2, (2,), "weft")
    assert kept is not None
    assert "backend" in {each.name for each in kept.rows[0].candidates if each.measured_seconds is not None}
    assert find_table(2, (2,), "gloo") is None  # --backend gloo would have made it
    assert f"kept in {tmp_path}" in lines[-1]
    assert run(["comm", "explain", "--processes", "2"]) == 0
    again = capfd.readouterr().out
    assert again.splitlines()[0:-2] == lines[0:-2]
    assert "--measure measures anew" in again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "1"], "1 ranks cannot be started here: use 2 to 64."),
        (["--cluster", "64x8xh100"], "512 ranks cannot be started here"),
        (["--processes", "2", "--cluster", "1x2xh100"], "--processes goes without --cluster"),
        (["--size", "many"], "many is no size"),
    ],
)
def test_what_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["comm", "explain", *arguments]) == 2
    assert message in capsys.readouterr().err
