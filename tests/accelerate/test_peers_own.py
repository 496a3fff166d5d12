"""The test scripts that Accelerate ships, as far as they need no GPU, run with this package in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).with_name("peers_own.py"))
WEFT = str(Path(sys.executable).with_name("weft"))
NEEDS_RANKS = "the test itself wants several processes"
RESET = "a session that was left says so in words of its own"
OTHERWISE = {
    1: {
        "test_script: check_seedable_sampler_in_batch_sampler_shard": NEEDS_RANKS,
        "test_script: test_reinstantiated_state": RESET,
    },
    2: {
        "test_ops: test_op_checker": "there is no `debug` mode: ranks that do different things are named always",
        "test_script: check_seedable_sampler_in_batch_sampler_shard": "it looks into the peer's own batch samplers",
        "test_script: test_reinstantiated_state": RESET,
        "test_sync: test_distributed_sync": "a backward wants the model's optimizer, and `grad` is a rank's part until"
        " the step",
        "test_sync: test_distributed_sync_multiple_fwd": "a backward wants the model's optimizer",
        "test_sync: test_gradient_accumulation_with_opt_and_scheduler": "schedules step once for each optimizer step,"
        " and not once for each process",
    },
}
"""By number of processes: what does not pass, and why."""


@pytest.mark.parametrize("ranks", OTHERWISE)
def test_the_peers_own_tests_pass_but_for_what_is_named(ranks: int, tmp_path: Path) -> None:
    names = ["test_ops", "test_script", "test_sync", *(["test_distributed_data_loop"] if ranks == 2 else [])]
    command = [WEFT, "launch", "-n", str(ranks), SCRIPT, *names]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    failed = {name: how for name, how in found.items() if how != "passed"}
    assert failed.keys() == OTHERWISE[ranks].keys(), failed
    assert len(found) - len(failed) >= 26
