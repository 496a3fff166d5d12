"""What `Accelerator` of the peer has that Weft's has not, or has in another way: the table of the guide.

`python tests/accelerate/surface.py` writes it anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.accelerate import Accelerator
from weft.accelerate.unsupported import METHODS, NAMES

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "coming-from-accelerate.md"
BEGIN, END = "<!-- table: made by tests/accelerate/surface.py -->", "<!-- table ends -->"
OTHERWISE = {
    "autocast": "nothing, where a plan says the precision (`Accelerator(plan=…)`, DeepSpeed's `bf16`)",
    "backward": "the loss is a mean over the process's samples, and counts with them; `retain_graph=` alone beside it",
    "clip_grad_norm_": "the 2-norm of a whole model; refused while gradients accumulate",
    "distributed_type": "`FSDP` and `DEEPSPEED` where such a plugin is given, else by device",
    "end_training": "closes the session; models are plain then",
    "free_memory": "what was prepared is forgotten, and others may be in its place",
    "gather": "an uneven last batch has the rows that it has",
    "gather_for_metrics": "exact without cutting; numbers and texts only, where it is no tensor",
    "get_state_dict": "on rank 0, and nothing elsewhere where ranks hold parts of the model",
    "join_uneven_inputs": "nothing is left to do: an uneven last batch is exact",
    "load_state": "generators and the place in the data, too, so that a pass goes on as if nothing had been",
    "no_sync": "nothing is left to do: gradients are reduced at the step",
    "num_processes": "those that see different samples: ranks among which a plan splits the model are one",
    "prepare": "models stay what they are; a batch of a loader is the global one",
    "print": "the first rank of each machine, at once",
    "process_index": "among those that see different samples",
    "save": "a dictionary of tensors, as safetensors; no pickles",
    "save_model": "safetensors under every plan",
    "save_state": "a folder that any plan loads on any number of ranks; no pickles",
    "scaler": "None: plans in fp16 scale losses by themselves",
    "split_batches": "True by default; False is obeyed, and said to make losses depend on the number of processes",
    "trigger_sync_in_backward": "nothing is left to do: gradients are reduced at the step",
    "unscale_gradients": "nothing is left to do",
    "verify_device_map": "says yes of such a model, which `prepare` refuses",
}
"""Names that are had in another way."""
ARGUMENTS = {
    "Accelerator(cpu=True)": "the device of the session",
    "Accelerator(device_placement=False)": "all things are on the job's device",
    "Accelerator(dynamo_backend=…)": "`compute.compile` of the plan; inductor alone",
    "Accelerator(megatron_lm_plugin=…)": "refused: `Accelerator(plan=…)`",
    "Accelerator(plan=…)": "new: a file, a `weft.Plan` or `auto`",
    "Accelerator(rng_types=…)": "no effect: loaders draw from rank 0's generators",
    "DataLoaderConfiguration(dispatch_batches=…, even_batches=…)": "no effect: batches are the same either way",
    "DataLoaderConfiguration(use_stateful_dataloader=…)": "no effect: prepared loaders keep their place",
    "DistributedDataParallelKwargs(comm_hook=…)": "refused: `data_parallel.compression` of a plan",
    "DistributedDataParallelKwargs(bucket_cap_mb=…, …)": "no effect: the plan says it",
    "GradScalerKwargs(init_scale=…, …)": "refused: plans in fp16 choose their scale by themselves",
    'mixed_precision="fp16"': "the plan's fp16, whose losses are scaled; on CPUs, too",
    "set_seed(device_specific=True)": "refused: losses would depend on the number of processes",
    "AcceleratedScheduler.step": "once for each optimizer step; the peer's steps once for each process",
    "OneCycleLR(total_steps=n * accelerator.num_processes)": "refused: leave the factor out",
    "find_executable_batch_size": "memory has to be short on all ranks together: as it is where they share out a batch",
}


def names_of(owner: Any) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]


def arguments_of(owner: Any, name: str) -> set[str] | None:
    """Names of a method's arguments; None: it takes any, or is none."""
    found = inspect.getattr_static(owner, name)
    found = getattr(found, "__func__", found)
    if not callable(found):
        return None
    parameters = inspect.signature(found).parameters.values()
    return {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def rows() -> Iterator[str]:
    for name, why in sorted({**OTHERWISE, **ARGUMENTS}.items(), key=lambda item: item[0].lower()):
        yield f"| `{name}` | {why} |"
    for name, instead in sorted(METHODS.items()):
        yield f"| `{name}` | not had. {instead} |"
    for instead in sorted(set(NAMES.values())):
        names = ", ".join(f"`{name}`" for name, other in sorted(NAMES.items()) if other == instead)
        yield f"| {names} | not had. {instead} |"


def table() -> str:
    return "\n".join(["| of Accelerate | here |", "|---|---|", *rows()])


def written(text: str) -> str:
    """The guide with the table as it is now."""
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", f"{BEGIN}\n\n{table()}\n\n{END}", text, flags=re.DOTALL)


if __name__ == "__main__":
    assert Accelerator
    GUIDE.write_text(written(GUIDE.read_text()))
