"""Reading CSV files of published runs, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.published import MEASURED_COLUMNS, PUBLISHED_RUNS, RUN_COLUMNS, read_rows
from published_examples import LLAMA, shipped, write

from weft.errors import DataError


def test_the_shipped_runs_are_whole() -> None:
    rows = read_rows(PUBLISHED_RUNS)
    assert len(rows) == 2095
    assert sum(row.measured.out_of_memory for row in rows) == 372
    assert len({row.run.family for row in rows}) == 30
    assert {*RUN_COLUMNS, *MEASURED_COLUMNS} <= set(shipped()[0])


def test_cells(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path / "runs.csv", [{**LLAMA, "vpp": "", "sp": "0", "step_time_s": "3.5"}]))
    assert (row.run.layers, row.run.chunks, row.run.sequence_parallel, row.run.between_gigabits) == (
        32,
        None,
        False,
        3200,
    )
    assert row.measured.step_seconds == 3.5
    assert row.use == "calibrate"


def test_a_file_may_lack_what_was_measured(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", [LLAMA], RUN_COLUMNS[2:])
    (row,) = read_rows(path)
    assert row.measured.step_seconds is None
    assert row.run.family == "unknown"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_gpus": "many"}, 'row 0 (line 2): n_gpus = "many" is no number of at least 0. Write a plain number'),
        ({"n_gpus": "2.5"}, 'n_gpus = "2.5" is no whole number above 0. Write one, or leave the cell empty'),
        ({"tp": "0"}, 'tp = "0" is no whole number above 0'),
        ({"step_time_s": "nan"}, 'step_time_s = "nan" is no number of at least 0'),
        ({"mfu": "-1"}, 'mfu = "-1" is no number'),
    ],
)
def test_wrong_cells(tmp_path: Path, change: dict[str, str], message: str) -> None:
    path = write(tmp_path / "runs.csv", [{**LLAMA, **change}])
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert message in str(caught.value)


def test_missing_columns(tmp_path: Path) -> None:
    rows = [{("gpus" if name == "n_gpus" else name): value for name, value in LLAMA.items() if name != "tp"}]
    with pytest.raises(DataError, match=r"lacks 2 of the columns that a run needs: n_gpus, tp\. Did you mean gpus\?"):
        read_rows(write(tmp_path / "runs.csv", rows))


def test_empty_files(tmp_path: Path) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    with pytest.raises(DataError, match="is empty. Its first line must name the columns"):
        read_rows(empty)
    with pytest.raises(DataError, match="has a header line but no row"):
        read_rows(write(tmp_path / "header.csv", [], RUN_COLUMNS))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_rows(tmp_path / "none.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(DataError, match="is no CSV text"):
        read_rows(binary)
