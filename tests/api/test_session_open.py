"""A session without `with`: closed by `close()` or by the end of its script, also where that ends by an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.errors import CollectiveError, RecipeError
from weft.run.launch.launcher import launch_script

LOOP = """
import sys
import torch, weft
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

session = weft.session(quiet=True, record=False)
model = nn.Linear(4, 2)
loader = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=8)
state = session.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=lambda out, batch: (out.sum(), len(out))
)
for batch in state.batches(2):
    state.step(batch)
session.print(f"took {state.steps} steps")
if "differ" in sys.argv and session.rank == 1:
    state.evaluate(loader)
if "fail" in sys.argv and session.rank == 1:
    raise ValueError("of the loop")
if "close" in sys.argv:
    session.close()
    session.close()
    print("closed")
"""


def script(folder: Path) -> Path:
    path = folder / "loop.py"
    path.write_text(LOOP)
    return path


def one_process(folder: Path, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *before, str(script(folder)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)


@pytest.mark.parametrize("argument", ["", "close"])
def test_a_script_that_leaves_its_session_open_ends_well(tmp_path: Path, argument: str) -> None:
    done = one_process(tmp_path, argument)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["took 2 steps", *["closed"][: len(argument)]]
    assert "Warning" not in done.stderr


def test_an_error_that_ends_it_is_told_once(tmp_path: Path) -> None:
    command = LOOP.replace(" and session.rank == 1", "")
    (tmp_path / "failing.py").write_text(command)
    done = subprocess.run(
        [sys.executable, "failing.py", "fail"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stderr.count("ValueError: of the loop") == 1


@pytest.mark.parametrize(("argument", "status", "said"), [
    ("", 0, "took 2 steps"),
    ("fail", 1, "ValueError: of the loop"),
    ("differ", 1, "state.evaluate()"),
])  # fmt: skip
def test_ranks_close_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], argument: str, status: int, said: str
) -> None:
    """Under Weft's launcher, whose report names what a session says as it is closed."""
    assert launch_script(str(script(tmp_path)), [argument], num_processes=2) == status
    told = "".join(capfd.readouterr())
    assert said in told
    assert "Exception ignored" not in told


def test_ranks_of_torchrun_that_end_apart_say_so(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = one_process(tmp_path, "differ", before=torchrun)
    assert done.returncode == 1
    assert "the ranks do different things" in done.stderr


def closed_twice() -> list[str]:
    session = weft.session(quiet=True, record=False)
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = session.prepare(model, optimizer, loader, loss=lambda out, batch: (out.sum(), len(out)))
    state.step(next(state.batches()))
    session.close()
    session.close()
    told = list[str]()
    for call in (state.save, lambda: session.prepare(model, optimizer, loader, loss=lambda out, batch: out.sum())):
        with pytest.raises(RecipeError) as caught:
            call()
        told.append(str(caught.value))
    with weft.session(quiet=True, record=False) as second:  # another may follow
        told.append(str(second.world_size))
        second.close()
    return told


def test_what_is_closed_takes_no_more(ranks: RankPool) -> None:
    for told in ranks.run(2, closed_twice):
        assert "after its session had ended" in told[0]
        assert "after its session had ended" in told[1]
        assert told[2] == "2"


def alone_at_the_end() -> str:
    session = weft.session(quiet=True, record=False)
    with pytest.raises(CollectiveError) as caught:
        _waits(session) if dist.get_rank() == 1 else session.close()
    session.close()
    return str(caught.value)


def _waits(session: weft.Session) -> None:
    with session, session.first():
        pass


def test_a_close_that_others_do_not_make_is_named(ranks: RankPool) -> None:
    for told in ranks.run(2, alone_at_the_end):
        assert "the end of the session" in told
        assert "session.first()" in told
