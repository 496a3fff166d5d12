"""`weft report RUN --plots FOLDER`: pictures whose figures are those of the pages."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from PIL import Image
from recorded_runs import MadeUpRun

from weft.cli import build_app
from weft.errors import LaunchError
from weft.watch import plots
from weft.watch.plots import PICTURES, picture_of, write_plots
from weft.watch.run_record import RunRecord
from weft.watch.views import page_of

NAMES = [picture.name for picture in PICTURES]


def run_command(*words: str) -> None:
    build_app()(["report", *words], exit_on_error=False, result_action="return_value")


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    run = MadeUpRun(folder=tmp_path / "run", data=2, pipeline=2, slow={(2, "forward"): 0.03})
    run.add(40)
    run.event("evaluation", step=20, validation_loss=5.5, seconds=1.0)
    run.event("evaluation", step=40, validation_loss=5.25, seconds=1.0)
    run.event("generation", number=2, restored_step=30, world_size=4)
    run.end()
    return run


def block_of(record: RunRecord, page: str, title: str) -> dict[str, Any]:
    return next(block for block in page_of(record, page)["blocks"] if block["title"] == title)


def drawn_lines(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.get_lines()
    }


def test_each_picture_is_a_file_that_can_be_read(
    run: MadeUpRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(str(run.folder), "--plots", str(tmp_path / "a" / "svg"))
    printed = capsys.readouterr().out
    assert "report.html" in printed
    assert "loss.svg, step-time.svg, states.svg, tokens.svg, memory.svg, communication.svg, plan.svg in" in printed
    assert "left out" not in printed
    for name in NAMES:
        root = ElementTree.parse(tmp_path / "a" / "svg" / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    run_command(str(run.folder), "--plots", str(tmp_path / "png"), "--format", "png")
    for name in NAMES:
        with Image.open(tmp_path / "png" / f"{name}.png") as image:
            assert image.format == "PNG"
            assert image.width > 1200
            assert len(image.convert("RGB").getcolors(1 << 20)) > 10
    assert sorted(path.stem for path in (tmp_path / "png").iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("picture", PICTURES, ids=NAMES)
def test_what_is_drawn_is_what_the_page_shows(run: MadeUpRun, picture: Any) -> None:
    record = RunRecord(run.folder)
    shown = block_of(record, picture.page, picture.title)
    figure = picture_of(picture, shown)
    (axes,) = figure.axes
    assert figure.get_suptitle().replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ") == shown["says"]
    assert (shown["unit"] or picture.label) in f"{axes.get_xlabel()} {axes.get_ylabel()}"
    lines = drawn_lines(axes)
    if shown["kind"] == "lines":
        for series in shown["series"]:
            assert lines[series["name"]] == list(zip(shown["x"], series["values"], strict=True))
        if shown["level"]:
            assert {value for _, value in lines["plan"]} == {shown["level"]["value"]}
        assert [text.get_text() for text in axes.texts] == [mark["label"] for mark in shown["marks"]]
        return
    assert [text.get_text() for text in axes.get_yticklabels()] == shown["rows"]
    widths = {str(bars.get_label()): [bar.get_width() for bar in bars.patches] for bars in axes.containers}
    parts = {part["name"]: part["values"] for part in shown["parts"] if any(part["values"])}
    assert {name: pytest.approx(values, rel=1e-9) for name, values in widths.items()} == parts
    ends = [
        max(bar.get_x() + bar.get_width() for bar in row)
        for row in zip(*(c.patches for c in axes.containers), strict=True)
    ]
    assert ends == pytest.approx(shown["totals"], rel=1e-3)
    if "against" in shown:
        assert lines["plan"] == [(value, row) for row, value in enumerate(shown["against"]) if value is not None]


def test_validation_is_drawn_beside_the_loss(run: MadeUpRun) -> None:
    record = RunRecord(run.folder)
    shown = block_of(record, "training", "Loss")
    figure = picture_of(PICTURES[0], shown, block_of(record, "training", "Validation loss"))
    assert drawn_lines(figure.axes[0])["validation loss"] == [(20, 5.5), (40, 5.25)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["loss", "validation loss"]


def test_what_is_not_known_is_no_zero(run: MadeUpRun) -> None:
    shown = block_of(RunRecord(run.folder), "training", "Loss")
    shown["series"][0]["values"][3] = None
    drawn = drawn_lines(picture_of(PICTURES[0], shown).axes[0])["loss"]
    assert math.isnan(drawn[3][1])
    shown = block_of(RunRecord(run.folder), "plan", "Plan and measurement, by term")
    shown["parts"][0]["values"][0] = shown["totals"][0] = None
    assert picture_of(PICTURES[-1], shown).axes[0].texts[0].get_text() == "–"


def test_a_run_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "$x^{2$ <b>&amp;]]>--\x01\x1b[31m\n运行\udcff"
    run = MadeUpRun(folder=tmp_path / name, data=2)
    run.add(12)
    run.end()
    monkeypatch.setattr(plots, "PICTURES", PICTURES[:1])
    for kind in ("svg", "png", "pdf"):
        assert write_plots(RunRecord(run.folder), tmp_path / "out", kind).paths == [tmp_path / "out" / f"loss.{kind}"]
    text = "".join(ElementTree.parse(tmp_path / "out" / "loss.svg").getroot().itertext())
    assert "".join(each if each.isprintable() else "?" for each in name) in text
    with Image.open(tmp_path / "out" / "loss.png") as image:
        image.load()
    assert (tmp_path / "out" / "loss.pdf").read_bytes().startswith(b"%PDF-")


def test_a_picture_without_data_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {"kind": "step", "loss": 3.5, "step_seconds": 2.0, "unix_time_seconds": 1e9}
    text = "".join(json.dumps({**report, "step": step}) + "\n" for step in range(1, 9))
    (tmp_path / "metrics.jsonl").write_text(text)
    run_command(str(tmp_path), "--plots", str(tmp_path / "out"))
    printed = capsys.readouterr().out
    assert "pictures  loss.svg, step-time.svg in" in printed
    assert "left out  states, memory, communication, plan: This run has no telemetry" in printed
    assert "left out  tokens: The run has no such figures." in printed
    assert sorted(os.listdir(tmp_path / "out")) == ["loss.svg", "step-time.svg"]
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "recipe.toml").write_text("")
    run_command(str(empty), "--plots", str(tmp_path / "none"))
    assert "pictures  none\nleft out  loss, step-time" in capsys.readouterr().out


def test_what_cannot_be_drawn_is_said(run: MadeUpRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RunRecord(run.folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"file/out cannot be written to: .*Name a folder"):
        write_plots(record, tmp_path / "file" / "out")
    (tmp_path / "out" / "loss.svg").mkdir(parents=True)
    with pytest.raises(LaunchError, match="cannot be written to"):
        write_plots(record, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["loss.svg"]  # and no part of a file
    with pytest.raises(LaunchError, match="Name a folder for them: --plots"):
        run_command(str(run.folder), "--format", "png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LaunchError, match=r'pip install "weft\[plots\]"'):
        write_plots(record, tmp_path / "out")


def test_nothing_of_pyplot_and_no_setting_is_touched(run: MadeUpRun, tmp_path: Path) -> None:
    script = (
        "import sys, weft.watch.plots as plots; from pathlib import Path; from weft.watch.run_record import RunRecord\n"
        "assert not any(name.startswith('matplotlib') for name in sys.modules)\n"
        "import matplotlib; before = matplotlib.rcParams.copy()\n"
        "plots.write_plots(RunRecord(Path(sys.argv[1])), Path(sys.argv[2]))\n"
        "assert 'matplotlib.pyplot' not in sys.modules; assert matplotlib.rcParams.copy() == before\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, str(run.folder), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
