"""`weft comm advise` as a user calls it: figures that hold, verdicts that follow from them, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.cli import run
from weft.techniques.compression.codecs import Estimate, verdict

SLOW = ["comm", "advise", "--parameters", "300K", "--bandwidth", "10Mbit/s", "--latency", "50us", "--zero", "0"]


def rows(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert run([*SLOW, *more, "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    results = rows(capsys, "--processes", "4", "--compute", "20ms")
    assert results["none"]["bytes_sent"] == 2 * 3 / 4 * 4 * 300_000
    assert results["none"]["wire_seconds"] == pytest.approx(1_800_000 / 1.25e6 + 6 * 50e-6)
    ratios = {name: results["none"]["bytes_sent"] / row["bytes_sent"] for name, row in results.items()}
    assert ratios["bf16"] == pytest.approx(2, rel=1e-3)
    assert ratios["int8"] == pytest.approx(3.94, rel=1e-2)
    assert ratios["randomk 10 %"] == pytest.approx(10, rel=1e-2)
    assert ratios["signsgd"] == pytest.approx(28.4, rel=1e-2)
    assert ratios["onebit"] == ratios["signsgd"]
    for name, row in results.items():
        if name != "none":
            assert row["codec_seconds"] > 0
            assert row["verdict"].startswith("pays: step")
            assert row["step_seconds"] < results["none"]["step_seconds"]


def test_top_k_at_a_half_saves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    results = rows(capsys, "--processes", "2", "--topk-share", "0.5")
    messages = results["topk 50 %"]["verdict"]
    assert messages == "saves nothing: it sends 1.00 × the bytes of no compression"
    assert results["topk 50 %"]["bytes_sent"] == results["none"]["bytes_sent"]
    results = rows(capsys, "--processes", "4", "--topk-share", "0.5")
    assert results["topk 50 %"]["verdict"].startswith("saves nothing: it sends 2.00 × the bytes")


def test_a_fast_link_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SLOW[:4], "--bandwidth", "400Gbit/s", "--latency", "1us", "--zero", "1"]) == 0
    messages = capsys.readouterr().out
    assert "none of them pays here." in messages
    assert "Nothing is chosen" in messages
    assert messages.count("does not pay") == 7
    assert "gathering of the weights" in messages


def test_what_backward_hides_is_no_gain() -> None:
    def estimate(wire: float, codec: float, step: float) -> Estimate:
        return Estimate(name="it", bytes_sent=wire * 1e6, wire_seconds=wire, codec_seconds=codec, step_seconds=step)

    messages = verdict(estimate(0.25, 0.1, 1.3), estimate(1.0, 0.0, 1.2))
    assert messages == "does not pay: exchange 2.86 × faster, but backward hides the exchange as it is"
    assert verdict(estimate(0.5, 0.6, 1.0), estimate(1.0, 0.0, 2.0)).startswith("does not pay: the codec takes longer")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parameters", "1M", "--cluster", "h100"], "nothing says how fast the links are"),
        (["--parameters", "1M", "--bandwidth", "1Gbit/s"], "--bandwidth and --latency go together"),
        (["--parameters", "1M", "--bandwidth", "1Gb/s", "--latency", "1us"], "bits or bytes: say which"),
        (["--bandwidth", "1GB/s", "--latency", "1us"], "needs a RECIPE or --parameters"),
        ([*SLOW[2:8], "--processes", "1"], "one data rank exchanges nothing"),
        ([*SLOW[2:8], "--zero", "3"], "--zero 3"),
        ([*SLOW[2:8], "--topk-share", "2"], "topk_share = 2"),
        ([*SLOW[2:8], "--randomk-share", "0"], "randomk_share = 0"),
        ([*SLOW[2:8], "--compute", "fast"], "--compute fast is not a time"),
        ([*SLOW[2:8], "--cluster", "2x8xh100"], "--cluster and --bandwidth cannot go together"),
    ],
)
def test_refusals(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["comm", "advise", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_cluster_gives_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["comm", "advise", "--parameters", "300K", "--cluster", "2x8xh100"]) == 0
    assert "16 data ranks" in capsys.readouterr().out
