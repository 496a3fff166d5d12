"""`python -m benchmarks.planner validate`: what it reads, what it writes, what it reports."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from benchmarks.planner import main
from benchmarks.published import (
    FACTORS,
    FACTORS_FITTED,
    MEASURED_COLUMNS,
    PUBLISHED_RUNS,
    accuracy_of,
    datasheet_knowledge,
    dump_accuracy,
    dump_constants,
    dump_forecasts,
    dump_knowledge,
    fitted_knowledge,
    report_of,
    validate,
)
from published_examples import LLAMA, shipped, validated, write

import weft.techniques.cost_terms
from weft.cli import run
from weft.errors import DataError
from weft.planning.price import accuracy


@pytest.mark.parametrize("mode", ["datasheet", "fitted"])
def test_no_prediction_reads_what_was_measured(tmp_path: Path, mode: str) -> None:
    rows = shipped(every=61)
    blank = [{**row, **dict.fromkeys(MEASURED_COLUMNS, "")} for row in rows]
    told = dump_forecasts(validate(write(tmp_path / "told.csv", rows), mode))  # type: ignore[arg-type]
    untold = dump_forecasts(validate(write(tmp_path / "untold.csv", blank), mode))  # type: ignore[arg-type]
    assert told == untold


def test_every_row_is_predicted_or_refused_with_a_reason(tmp_path: Path) -> None:
    rows = shipped(every=37)
    found = json.loads(dump_forecasts(validate(write(tmp_path / "runs.csv", rows), "datasheet")))
    assert [entry["row"] for entry in found] == list(range(len(rows)))
    for entry in found:
        assert set(entry) == {"row", "step_time_s", "peak_mem_gib", "refused"}
        if entry["refused"] is None:
            assert 0 < entry["step_time_s"] < 1e4
            assert 0 < entry["peak_mem_gib"] < 1e4
        else:
            assert entry["refused"]
            assert entry["step_time_s"] is None


def test_fitted_predictions_do_not_depend_on_the_other_rows(tmp_path: Path) -> None:
    alone = json.loads(dump_forecasts(validate(write(tmp_path / "one.csv", [LLAMA]), "fitted")))
    among = json.loads(dump_forecasts(validate(write(tmp_path / "many.csv", [LLAMA, *shipped(every=200)]), "fitted")))
    assert among[0] == alone[0]


def test_few_rows_set_the_scalar_of_their_family_and_are_not_scored(tmp_path: Path) -> None:
    rows = [{**LLAMA, "global_batch": str(64 * (place + 1)), "tokens_per_s_per_gpu": "3000"} for place in range(12)]
    path = write(tmp_path / "runs.csv", rows)
    without, adapted = validate(path, "datasheet"), validate(path, "datasheet", few_shot=5)
    (before,), (after,) = without.score.families, adapted.score.families
    assert before.time is not None
    assert after.time is not None
    assert (before.time.count, after.time.count) == (12, 7)
    assert after.time.median < before.time.median / 3
    with pytest.raises(DataError, match="--few-shot -1"):
        validate(path, "datasheet", few_shot=-1)


def test_cross_validation_fits_on_the_other_families(tmp_path: Path) -> None:
    rows = [
        *shipped(every=3, families=["korthikanti", "megatron-sc21", "zero-bubble"]),
        *({**LLAMA, "tokens_per_s_per_gpu": "9000", "global_batch": str(64 * n)} for n in (1, 2, 4)),
    ]
    path = write(tmp_path / "runs.csv", rows)
    found = validate(path, "fitted", cross_validate=True)
    assert found.cross_validated
    someone = {**LLAMA, "tokens_per_s_per_gpu": "90000"}
    other = validate(write(tmp_path / "other.csv", [*rows[:-3], *[someone] * 3]), "fitted", cross_validate=True)
    # The family's own figures change nothing for it, and something for the others.
    assert found.outcomes[-3].forecast.step_seconds == pytest.approx(
        validate(path, "fitted", cross_validate=True).outcomes[-3].forecast.step_seconds
    )
    assert found.outcomes[0].forecast.step_seconds != other.outcomes[0].forecast.step_seconds


def test_report(tmp_path: Path) -> None:
    rows = shipped(every=5, families=["bigscience", "hagemann", "alpa", "korthikanti"])
    report = report_of(validate(write(tmp_path / "runs.csv", rows), "datasheet"))
    assert {row[0] for row in report.table} == {"bigscience", "hagemann", "korthikanti", "median of families"}
    assert all(len(row) == len(report.header) for row in report.table)
    said = "\n".join(report.lines)
    assert "layouts judged rightly" in said
    assert "alpa: the layout is not known: dp, tp, pp are empty" in said


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write(tmp_path / "runs.csv", shipped(every=100)), tmp_path / "out.json"
    assert main(["validate", str(path), "--mode", "datasheet", "--json", str(out)]) == 0
    assert len(json.loads(out.read_text())) == len(shipped(every=100))
    assert "predictions know data sheets only" in capsys.readouterr().out
    assert main(["validate", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["validate", str(path), "--json", str(tmp_path / "no" / "out.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["validate", str(path), "--mode", "guess"])


def test_the_command_of_before_says_where_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "validate", "my runs.csv", "--mode", "datasheet", "--few-shot", "5"]) == 2
    told = capsys.readouterr().err
    assert "run `python -m benchmarks.planner validate 'my runs.csv' --mode datasheet --few-shot 5`" in told
    assert run(["plan", "validate"]) == 2


def test_the_shipped_figures_are_those_of_the_page_and_the_rows() -> None:
    """What a fit does not change is computed here; the rest is compared with the page that the same command wrote."""
    shipped_figures, computed = accuracy(), accuracy_of(validated())
    for name in ("rows", "families", "largest_parameters", "most_devices"):
        assert getattr(shipped_figures, name) == getattr(computed, name), name
    page = (Path(__file__).parents[2] / "docs" / "notebook" / "planner-accuracy.md").read_text()
    medians = [line.split(" | ") for line in page.splitlines() if line.startswith("| median of families")]
    assert (f"{shipped_figures.median:.1%}", f"{shipped_figures.p90:.1%}") in [(row[2], row[3]) for row in medians]
    assert f"| {shipped_figures.worst_family} |" in page
    assert f"median {shipped_figures.median:.1%}" in shipped_figures.line


def test_the_shipped_figures_are_what_a_cross_validation_computes() -> None:
    computed = accuracy_of(validate(PUBLISHED_RUNS, "fitted", cross_validate=True))
    assert tomllib.loads(dump_accuracy(computed)) == dataclasses.asdict(accuracy())


def test_the_shipped_constants_are_those_that_were_fitted() -> None:
    shipped_text = (Path(weft.techniques.cost_terms.__file__).parent / "fitted.toml").read_text()
    told = [line.removeprefix("# ") for line in shipped_text.splitlines() if line.startswith("#")]
    assert dump_constants(FACTORS_FITTED.read_text(), told) == shipped_text


def test_shipped_constants_stay_near_the_data_sheets() -> None:
    fitted, sheet = fitted_knowledge(), datasheet_knowledge()
    assert fitted.calibration.name == "fitted"
    assert 0.8 < fitted.calibration.matmul_share("a100", "bf16") / sheet.calibration.matmul_share("a100", "bf16") < 1.2
    assert all(0.5 < scalar.slowdown < 2.5 for scalar in fitted.stacks.values())
    assert 0.1 < fitted.unseen.spread < 0.35
    assert fitted.scalar("a framework that nobody knows") == fitted.unseen
    assert dump_knowledge(fitted, dict.fromkeys(FACTORS, 1.0), ["told"]).startswith("# told\n")
