"""Accelerate's public test scripts, what of them needs no GPU, hold with their import changed, named ones apart."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from pool import RankPool

FROM_TESTS = re.compile(r"from accelerate\.test_utils[\w.]* import (\([^)]*\)|[^\n]*)")
PEER = re.compile(r"^(\s*)(from|import) accelerate\b(?!\.test_utils)", re.MULTILINE)
CHECKS = {
    "test_script": [
        *("process_execution_check", "test_split_between_processes_list", "test_split_between_processes_nested_dict"),
        *("test_split_between_processes_tensor", "test_split_between_processes_evenly", "rng_sync_check"),
        *("dl_preparation_check", "central_dl_preparation_check", "custom_sampler_check", "check_seedable_sampler"),
        *("check_seedable_sampler_with_data_seed", "test_trigger"),
    ],
    "test_ops": [
        *("test_gather", "test_gather_object", "test_gather_non_contiguous", "test_broadcast"),
        *("test_pad_across_processes", "test_reduce_sum", "test_reduce_mean"),
    ],
    "test_sync": ["test_dataloader_break"],
}
"""Checks of the peer's scripts that hold on one and on two processes."""
ALONE = {
    "test_script": ["training_check"],
    "test_ops": ["test_op_checker"],
    "test_sync": ["test_noop_sync", "test_distributed_sync_multiple_fwd"],
}
"""Those that hold on one process."""
DIFFERENT = {
    "check_seedable_sampler_in_batch_sampler_shard": "a batch sampler stays the user's own, of class BatchSampler",
    "test_op_checker": "on two processes: ranks compare what they give a collective without a debug mode",
    "test_distributed_sync": "gradients are reduced at the step, and a backward has to have a prepared optimizer",
    "test_gradient_accumulation": "as test_distributed_sync",
    "test_gradient_accumulation_with_opt_and_scheduler": "a scheduler steps once for each optimizer step",
    "training_check": "on two processes: a loader's batch is the global one",
    "test_reinstantiated_state": "an optimizer asks no state that was reset: it is the user's own",
}


def checked(name: str, checks: list[str], folder: str) -> dict[str, str]:
    """What each check raises; nothing of those that pass."""
    from accelerate.test_utils import testing, training

    from weft.accelerate import Accelerator, opening
    from weft.accelerate.state import AcceleratorState, PartialState
    from weft.accelerate.utils import gather

    spec = find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "test_utils" / "scripts" / f"{name}.py").read_text()
    space: dict[str, Any] = {**vars(testing), **vars(training), "__name__": name}
    failed: dict[str, str] = {}
    with opening(record=False, quiet=True), contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(folder):
        exec(compile(PEER.sub(r"\1\2 weft.accelerate", FROM_TESTS.sub("pass", text)), name, "exec"), space)

        def are_the_same_tensors(tensor: torch.Tensor) -> bool:
            rows = gather(tensor[None].clone())
            return bool((rows == rows[:1]).all())

        space["are_the_same_tensors"] = are_the_same_tensors
        for check in checks:
            known = {"state": PartialState, "accelerator": Accelerator}
            given = [known[each]() for each in inspect.signature(space[check]).parameters if each in known]
            try:
                space[check](*given)
            except Exception as error:
                failed[check] = f"{type(error).__name__}: {error}"
        AcceleratorState._reset_state()
    return failed


@pytest.mark.parametrize("name", CHECKS)
def test_its_checks_hold(ranks: RankPool, tmp_path: Path, name: str) -> None:
    alone = ranks.run(1, checked, name, [*CHECKS[name], *ALONE.get(name, [])], str(tmp_path))
    assert alone == [{}]
    assert ranks.run(2, checked, name, CHECKS[name], str(tmp_path)) == [{}, {}]
