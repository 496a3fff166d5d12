"""A training that resumes from a state which somebody forged, digests and all: the same losses, or an error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from forge import forgeries, write_forged
from pool import RankPool
from test_resume import LOOPS, digits_recipe, run_loop

from weft.errors import CheckpointError, DataError, WeftError


def forge_states(folder: Path, seed: int) -> list[str]:
    """On one rank: what a training does that resumes from forged states.  Returns what went wrong."""
    whole = run_loop(digits_recipe(6), LOOPS[1], folder / "whole")[0].losses
    run_loop(digits_recipe(2), LOOPS[1], folder / "run")
    run_loop(digits_recipe(4), LOOPS[1], folder / "run")
    newest = folder / "run" / "step-000004"
    manifest = json.loads((newest / "manifest.json").read_bytes())["manifest"]
    wrong = list[str]()
    for what, state in forgeries(manifest["state"], seed, 3):
        again = folder / "again"
        shutil.copytree(folder / "run", again)
        write_forged(again / "step-000004", None, {**manifest, "state": state})
        try:
            losses = run_loop(digits_recipe(6), LOOPS[1], again)[0].losses
            if losses != whole[-len(losses) :] or len(losses) not in (2, 4):
                wrong.append(f"{what}: {losses} and not {whole}")
        except WeftError as error:
            if not isinstance(error, CheckpointError | DataError):
                wrong.append(f"{what}: {error!r}")
        except Exception as error:
            wrong.append(f"{what}: {error!r}")
        shutil.rmtree(again)
    return wrong


@pytest.mark.parametrize("seed", range(2))
def test_training_resumed_from_a_forged_state_is_the_same_or_refused(
    ranks: RankPool, tmp_path: Path, seed: int
) -> None:
    assert ranks.run(1, forge_states, tmp_path, seed, timeout=100) == [[]]
