"""Runs functions of the test scripts that Accelerate ships, with this package where they import `accelerate`.

`python peers_own.py`, on every rank; prints by function `passed` or its error.  The scripts and what they test with
(`accelerate.test_utils`) are Accelerate's; nothing else of it is imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from weft.accelerate.in_place import stand_in

_HELD = Path(str(importlib.metadata.distribution("accelerate").locate_file("accelerate")))
_TESTS = "accelerate.test_utils"


class _Tests(MetaPathFinder):
    """Finds Accelerate's own helpers for tests, and no other of its modules."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _TESTS and not fullname.startswith(f"{_TESTS}."):
            return None
        place = _HELD.joinpath(*fullname.split(".")[1:])
        if place.is_dir():
            inside = place / "__init__.py"
            return importlib.util.spec_from_file_location(fullname, inside, submodule_search_locations=[str(place)])
        return importlib.util.spec_from_file_location(fullname, place.with_suffix(".py"))


def operations(of: Any) -> list[Callable[[], Any]]:
    state = of.PartialState()
    names = ("gather", "gather_object", "gather_non_contiguous", "broadcast", "pad_across_processes")
    names += ("reduce_sum", "reduce_mean", "reduce_max", "op_checker", "copy_tensor_to_devices")
    return [_call(of, f"test_{name}", state) for name in names]


def scripts(of: Any) -> list[Callable[[], Any]]:
    names = ("init_state_check", "process_execution_check", "test_split_between_processes_list")
    names += ("test_split_between_processes_nested_dict", "test_split_between_processes_tensor")
    names += ("test_split_between_processes_evenly", "rng_sync_check", "dl_preparation_check")
    names += ("central_dl_preparation_check", "custom_sampler_check", "check_seedable_sampler")
    names += ("check_seedable_sampler_with_data_seed", "check_seedable_sampler_in_batch_sampler_shard")
    training = [_call(of, "training_check", use_seedable_sampler=each) for each in (False, True)]
    last = ("test_trigger", "test_reinstantiated_state")
    return [*(_call(of, name) for name in names), *training, *(_call(of, name) for name in last)]


def accumulation(of: Any) -> list[Callable[[], Any]]:
    """What its `main` runs on CPUs."""
    accelerator = of.Accelerator()
    names = ("noop_sync",) if accelerator.num_processes == 1 else ("distributed_sync", "distributed_sync_multiple_fwd")
    return [
        _call(of, "test_dataloader_break"),
        *(_call(of, f"test_{name}", accelerator) for name in names),
        _call(of, "test_gradient_accumulation_with_opt_and_scheduler"),
    ]


def loaders(of: Any) -> list[Callable[[], Any]]:
    """What speaks of samples; the rest speaks of `even_batches`."""
    accelerator = of.create_accelerator()
    data = of.DummyDataset()
    whole = of.BatchSampler(of.RandomSampler(data), batch_size=of.BATCH_SIZE, drop_last=False)
    samplers = ({"shuffle": False, "batch_size": of.BATCH_SIZE}, {"shuffle": True, "batch_size": of.BATCH_SIZE})
    return [
        _call(of, "test_data_loader", of.DataLoader(data, **each), accelerator)
        for each in (*samplers, {"batch_sampler": whole})
    ]


ALL: dict[str, Callable[[Any], list[Callable[[], Any]]]] = {
    "test_ops": operations,
    "test_script": scripts,
    "test_sync": accumulation,
    "test_distributed_data_loop": loaders,
}


def _call(of: Any, name: str, *given: Any, **named: Any) -> Callable[[], Any]:
    def called() -> Any:
        return getattr(of, name)(*given, **named)

    said = [f"{key}={each}" for key, each in named.items()]
    called.__name__ = f"{name}({', '.join(said)})" if said else name
    return called


def _count_as_the_peer(module: Any) -> None:
    """Let a loader's batch be a process's, by `split_batches=False`, where nothing is said: the scripts count so."""
    from weft.accelerate import DataLoaderConfiguration

    made, configuration = module.Accelerator, functools.partial(DataLoaderConfiguration, split_batches=False)
    if hasattr(module, "DataLoaderConfiguration"):
        module.DataLoaderConfiguration = configuration
    module.Accelerator = lambda *given, **named: made(*given, **{"dataloader_config": configuration(), **named})


def main(names: list[str]) -> None:
    stand_in()
    sys.meta_path.insert(0, _Tests())
    found: dict[str, str] = {}
    for name in names or ALL:
        module: Any = importlib.import_module(f"{_TESTS}.scripts.{name}")
        if hasattr(module, "Accelerator"):
            _count_as_the_peer(module)
        for each in ALL[name](module):
            try:
                each()
                found[f"{name}: {each.__name__}"] = "passed"
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                found[f"{name}: {each.__name__}"] = f"{type(error).__name__}: {error} ({frame.name}:{frame.lineno})"
    from weft.accelerate import PartialState

    if PartialState().is_main_process:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
