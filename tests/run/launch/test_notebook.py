"""A notebook, run by nbclient: training, sessions on two ranks, an error in a rank, a cell that is run again, and one
that is interrupted.  Whoever reads the cell's output finds the reason among its first lines."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Generator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install 'weft[dev]'")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

FIRST_LINES = 15
IMPORTS = """
import torch
from dataclasses import dataclass
from pathlib import Path
from torch import nn
import torch.nn.functional as F
import weft
from weft.run.launch.launcher import ForkServer

fork_server = ForkServer(preload=["weft.api"])
WIDTH, here = 4, Path({folder!r})
"""
CLASSES = """
@dataclass
class Shape:
    width: int = WIDTH

class Base(nn.Module):
    pass

class Net(Base):
    def __init__(self, shape):
        super().__init__()
        self.layer = nn.Linear(shape.width, 1)

    def forward(self, rows):
        return self.layer(rows)

def loss_fn(outputs, batch):
    return F.mse_loss(outputs, batch[1], reduction="sum"), len(outputs)
"""
TRAIN = """
def train(lr, breaks=False):
    torch.manual_seed(0)
    rows = torch.randn(24, WIDTH)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, rows[:, :1]), batch_size=8)
    with weft.session(folder=here / "run", quiet=True) as session:
        model = Net(Shape())
        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), loader, loss=loss_fn)
        for batch in state.batches(3):
            loss = state.step(batch).loss
            if breaks and session.rank == 1:
                raise ValueError("of the loop")
        session.print("ranks:", session.world_size)
        return loss
"""


class Notebook:
    """A kernel, and the cells that it has run."""

    def __init__(self, folder: Path) -> None:
        self.book = nbformat.v4.new_notebook()
        self.client = nbclient.NotebookClient(
            self.book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )

    def run(self, source: str) -> str:
        """Run a cell, and return what stands below it, as a person sees it."""
        cell = nbformat.v4.new_code_cell(source.strip())
        self.book.cells.append(cell)
        with contextlib.suppress(nbclient.exceptions.CellExecutionError):
            self.client.execute_cell(cell, len(self.book.cells) - 1)
        return _seen(cell.outputs)


def _seen(outputs: list[Any]) -> str:
    results: list[str] = []
    for output in outputs:
        match output.output_type:
            case "stream":
                results.append(output.text)
            case "error":
                results.append("\n".join(output.traceback))
            case _:
                results.append(output.data.get("text/plain", ""))
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(results))


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Generator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # with it, a kernel leaves out what processes print
        made = Notebook(folder)
        with made.client.setup_kernel():
            assert made.run(IMPORTS.format(folder=str(folder))) == ""
            assert made.run(CLASSES) == ""
            yield made
            made.run("fork_server.close()")


def _first(text: str) -> str:
    """The lines that are seen without scrolling."""
    return "\n".join(text.splitlines()[:FIRST_LINES])


SPAWN = "weft.spawn(train, processes={}, arguments={}, fork_server=fork_server)"


def _losses(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"0\.\d+|[1-9]\d*\.\d+", text[text.index("[") :])]


def test_a_cells_function_is_a_session_on_two_ranks_and_the_cell_can_run_again(notebook: Notebook) -> None:
    assert notebook.run(TRAIN) == ""
    alone = notebook.run("train(0.1)")
    results = notebook.run(SPAWN.format(2, {"lr": 0.1}))
    assert results.count("ranks: 2") == 1
    losses = _losses(results)
    assert len(losses) == 2
    assert losses == pytest.approx([float(alone.splitlines()[-1])] * 2, rel=1e-5)
    assert _losses(notebook.run(SPAWN.format(2, {"lr": 0.1}))) == losses
    # A cell that was changed and run again is what the ranks run.
    assert notebook.run(TRAIN.replace("return loss", "return loss * 0 + 7.5")) == ""
    assert _losses(notebook.run(SPAWN.format(2, {"lr": 0.1}))) == [7.5, 7.5]


def test_an_error_of_a_rank_is_read_in_the_first_lines_and_the_cell_can_run_again(notebook: Notebook) -> None:
    notebook.run(TRAIN)
    number = sum(cell.cell_type == "code" for cell in notebook.book.cells)
    results = notebook.run(SPAWN.format(2, {"lr": 0.1, "breaks": True}))
    assert "rank 1 of 2" in _first(results)
    assert "ValueError: of the loop" in _first(results)
    line = TRAIN.strip().splitlines().index('                raise ValueError("of the loop")') + 1
    assert f"cell_{number}.py, line {line}, in train" in _first(results)
    assert len(results.splitlines()) <= FIRST_LINES
    assert len(_losses(notebook.run(SPAWN.format(2, {"lr": 0.1})))) == 2


def test_an_error_of_wefts_own_names_the_cells_line(notebook: Notebook) -> None:
    wrong = TRAIN.replace("if breaks and session.rank == 1:", "if breaks and session.rank == 1 and state.save():")
    notebook.run(wrong)
    results = notebook.run(SPAWN.format(2, {"lr": 0.1, "breaks": True}))
    assert "the ranks do different things" in _first(results)
    assert "state.save() at cell_" in _first(results)
    assert len(results.splitlines()) <= FIRST_LINES


def test_an_error_in_the_kernels_own_process_is_short_too(notebook: Notebook) -> None:
    results = notebook.run("with weft.session(collective_timeout_seconds=-1):\n    pass")
    assert "collective_timeout_seconds = -1" in _first(results)
    assert "line 1" in _first(results)
    assert len(results.splitlines()) <= FIRST_LINES


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (
            "model = nn.Linear(2, 2)\ndef use():\n    return model\n",
            "use uses model, a Linear that lives in this process",
        ),
        ("use = lambda: 3\n", "is no function with a name"),
        (
            "def make():\n    value = 3\n    def use():\n        return value\n    return use\nuse = make()\n",
            "another function",
        ),
        ("def use(lr=1):\n    return torch.ones(lr)\n", "use returned what cannot be sent back"),
    ],
)
def test_what_ranks_cannot_have_is_refused_by_name(notebook: Notebook, cell: str, text: str) -> None:
    results = notebook.run(cell + "weft.spawn(use, processes=1, fork_server=fork_server)")
    assert text in _first(results)
    assert len(results.splitlines()) <= FIRST_LINES


def test_arguments_are_those_of_the_function(notebook: Notebook) -> None:
    notebook.run(TRAIN)
    assert "do not fit train" in notebook.run(SPAWN.format(2, '{"rate": 3}'))
    assert "arguments= has lr, a Tensor" in notebook.run(SPAWN.format(2, '{"lr": torch.ones(2)}'))


def test_an_interrupted_cell_leaves_no_rank_and_runs_again(notebook: Notebook) -> None:
    notebook.run("import time, os\ndef wait():\n    Path(here, str(os.getpid())).touch()\n    time.sleep(60)")
    folder, kernel = Path(notebook.run("print(here)").strip()), int(notebook.run("os.getpid()"))

    def interrupt() -> None:
        while len(list(folder.glob("[0-9]*"))) < 2:
            time.sleep(0.05)
        os.kill(kernel, signal.SIGINT)  # what the button does

    other = Thread(target=interrupt)
    begun = time.monotonic()
    other.start()
    results = notebook.run("weft.spawn(wait, processes=2, fork_server=fork_server)")
    other.join()
    assert "KeyboardInterrupt" in results
    assert time.monotonic() - begun < 30
    assert not [path.name for path in folder.glob("[0-9]*") if Path("/proc", path.name).exists()]
    notebook.run(TRAIN)
    assert len(_losses(notebook.run(SPAWN.format(2, {"lr": 0.1})))) == 2


def test_a_recipe_trains(notebook: Notebook) -> None:
    results = notebook.run("""
from weft.config.recipe import BatchRecipe, ConvNetShape, DataRecipe, DataSource, ModelRecipe, Recipe, RunRecipe
recipe = Recipe(
    model=ModelRecipe(shape=ConvNetShape(num_layers=2, channels=16)),
    data=DataRecipe(train=(DataSource(source="digits"),)),
    batch=BatchRecipe(global_batch_size=50),
    run=RunRecipe(steps=3),
)
len(weft.train(recipe, processes=2, quiet=True, folder=here / "recipe", fork_server=fork_server).losses)
""")
    assert results.strip().splitlines()[-1] == "3"
