"""Statements of users' first days with a session that no other test holds; `tests/findings.toml` has all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pool import RankPool
from session_places import agent, as_launched
from test_session_traps import build, plan_for, prepared, session_of

import weft
from weft.cli import run
from weft.errors import WeftError

ENDING = """
import gc
import tempfile
import torch
import torch.distributed as dist
from weft.comm.shared_memory import register_shared_memory_backend

register_shared_memory_backend()
dist.init_process_group("weft", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
dist.all_reduce(torch.ones(10))
(engine,) = (one for one in gc.get_objects() if type(one).__name__ == "Engine" and type(one).__module__[:5] == "weft.")


class Last:
    def __init__(self, end):
        self.end = end

    def __del__(self):
        self.end.__func__.__globals__.update(sys=None, os=None)  # as the interpreter leaves a module at its end
        self.end()


last = Last(engine.__del__)
print("good")
"""


def _on_one_rank(folder: str, port: int, what: str) -> str:
    with as_launched(port) as rank:
        try:
            with session_of(folder, plan_for(2)) as session:
                model = build()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
                state = prepared(session, model, optimizer=optimizer)
                for batch in state.batches(3):
                    state.step(batch)
                    if rank == 0:
                        _ = scheduler.step() if what == "scheduler" else state.save()
        except WeftError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("scheduler", r"SGD's lr \(group 0\) differs between the ranks: 0\.05 on rank 0, 0\.1 on rank 1"),
        (
            "save",
            r"rank 0 is in state.save\(\) at test_findings.py:\d+, rank 1 is in state.step\(\) at test_findings.py:\d+",
        ),
    ],
)
def test_what_rank_0_does_alone_is_named_with_its_line(ranks: RankPool, tmp_path: Path, what: str, text: str) -> None:
    with agent() as port:
        for found in ranks.run(2, _on_one_rank, str(tmp_path), port, what, timeout=40):
            assert re.search(text, found), found
            assert len(found.splitlines()) <= 15


def test_what_weft_has_is_listed() -> None:
    assert {"train", "session", "check", "generate"} <= set(dir(weft))


def test_caches_lie_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    Path("text.txt").write_text("some text\n" * 100)
    assert run(["data", "prepare", "text.txt", "--vocabulary-size", "270"]) == 0
    assert list(Path("caches", "weft").glob("*/manifest.json"))


def test_a_number_of_ranks_is_processes_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["comm", "draw", "--algorithm", "ring", "--processes", "3"]) == 0
    assert run(["comm", "draw", "--algorithm", "ring", "--members", "3"]) == 2
    assert "Unknown option: --members" in capsys.readouterr().err


def test_a_group_that_ends_after_its_module_says_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("good\n", "")
