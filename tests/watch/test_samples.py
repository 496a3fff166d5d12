"""Texts that were generated, on the page of the training."""

from __future__ import annotations

from pathlib import Path

from recorded_runs import MadeUpRun

from weft.watch.run_record import RunRecord
from weft.watch.samples import keep_sample, newest_samples, samples_file
from weft.watch.views import page_of


def test_the_newest_are_shown_first_and_what_is_none_is_left_out(tmp_path: Path) -> None:
    run = MadeUpRun(folder=tmp_path / "run", data=2, began=10.0)
    run.add(5)
    record = RunRecord(run.folder)
    titles = [block["title"] for block in page_of(record, "training")["blocks"]]
    assert "Generated texts" not in titles
    path = samples_file(record.folder)
    for step in range(1, 12):
        keep_sample(
            path, {"step": step, "prompt": "def ", "text": f"def f{step}(): <b>", "temperature": 0.8, "top_k": None}
        )
    with path.open("a") as file:
        file.write('{"step": "x", "text": "a"}\n{"step": 3}\n[1]\n{"step": 4, "te')
    assert record.refresh()
    (block,) = (block for block in page_of(record, "training")["blocks"] if block["title"] == "Generated texts")
    assert block["says"] == "What the model made of a prompt, by weft generate: 8 texts, the newest first."
    assert block["texts"][0] == {"title": "step 11, temperature 0.8, prompt 'def '", "text": "def f11(): <b>"}
    assert len(newest_samples(path, 100)) == 11
    keep_sample(path, {"step": 12, "text": "after half a line"})
    assert newest_samples(path, 1) == [{"step": 12, "text": "after half a line"}]
    record.close()
    run.end()
