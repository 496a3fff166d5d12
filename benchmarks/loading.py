"""Memory of each rank while a folder's weights are loaded, beside what it holds afterwards.

A random Llama of a billion parameters is written to a temporary folder in bf16, in shards, and loaded by four
processes.  Each reports the most memory that it had resident when it read the last tensor, and in the end, less that of
a rank that has imported and formed the same and loads nothing.  When the last tensor is read, no rank may have needed
more than its weights and one tensor; in the end no more than these, the gradients and one tensor.
"""

from __future__ import annotations

import gc
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from weft.analysis.blueprint import build_blueprint
from weft.comm.mesh import Mesh
from weft.config.plan import Plan, parse_plan
from weft.config.recipe import parse_recipe
from weft.model.stored import Box, StoredTensor, stored_tensors
from weft.run.launch import RankInfo, initialise_distributed
from weft.run.launch.launcher import launch_function
from weft.techniques.build import parallelize

CONFIG: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 19,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
SHARD = "500MB"
PLANS = {
    "tensor 2 x data 2": "[mesh]\ntensor = 2\nshard = 2\n",
    "data 4, ZeRO-3": "[mesh]\nshard = 4\n[data_parallel]\nzero = 3\n",
}
_MIB = 2**20


def main() -> None:
    parser = options_parser(__doc__, rounds=1)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="blocks of the model")
    options = parser.parse_args()
    about = {"machine": machine(), "versions": versions("transformers", "safetensors"), "note": options.note}
    folder = Path(tempfile.mkdtemp(prefix="weft-loading-"))
    try:
        parameters, largest = write_model(folder, options.layers)
        samples: dict[str, Any] = {"parameters": parameters, "largest_tensor_bytes": 4 * largest}
        goals: list[Goal] = []
        for name, plan in PLANS.items():
            ranks = samples[name] = _measure(folder, plan)
            for what, peak, share in (
                ("reading", "reading_bytes", "weight_bytes"),
                ("all", "peak_bytes", "state_bytes"),
            ):
                over = [rank[peak] - rank["empty_bytes"] - rank[share] for rank in ranks]
                log(f"{name}, {what}: {[round(each / _MIB) for each in over]} MiB above {ranks[0][share] // _MIB} MiB")
                goals.append(
                    Goal(
                        what=f"memory of the worst rank above its share, {name}, {what}",
                        measured=max(over) / _MIB,
                        goal=4 * largest / _MIB,
                        better="lower",
                        unit=" MiB",
                    )
                )
        settings = {"config": {**CONFIG, "num_hidden_layers": options.layers}, "plans": PLANS, "shards": SHARD}
        write_result(
            "loading", goals=goals, samples=samples, about={**about, "settings": settings}, folder=options.folder
        )
    finally:
        shutil.rmtree(folder)


def write_model(folder: Path, layers: int) -> tuple[int, int]:
    """Write the model; return its parameters, and those of its largest tensor."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {**CONFIG, "num_hidden_layers": layers, "dtype": "bfloat16"}
    config = transformers.LlamaConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    numbers = [parameter.numel() for parameter in model.parameters()]
    log(f"writing {sum(numbers) / 1e9:.2f} billion parameters")
    model.save_pretrained(folder, max_shard_size=SHARD)
    del model
    gc.collect()
    return sum(numbers), max(numbers)


def _measure(folder: Path, plan: str) -> list[dict[str, int]]:
    """What every rank of a plan had at most, with and without loading."""
    world = parse_plan(plan).mesh.world_size
    found: dict[str, list[dict[str, int]]] = {}
    for what in ("empty", "loaded"):
        arguments = {"model": str(folder), "plan": plan, "loads": what == "loaded"}
        found[what] = launch_function("benchmarks.loading:run_rank", arguments, world, threads_per_rank=1)
    pairs = zip(found["empty"], found["loaded"], strict=True)
    return [{**loaded, "empty_bytes": empty["peak_bytes"]} for empty, loaded in pairs]


def run_rank(rank_info: RankInfo, *, model: str, plan: str, loads: bool) -> dict[str, int]:
    """Describe the model, form the groups, load the weights if so told, and return what that took."""
    torch.set_num_threads(1)
    recipe = parse_recipe(
        f'[model]\nhf = "{model}"\nsequence_length = 128\n[batch]\nglobal_batch_size = 4\n[run]\nsteps = 1\n'
        '[data]\ntrain = [{ source = "synthetic" }]\n'
    )
    how: Plan = parse_plan(plan)
    with initialise_distributed("cpu", rank_info) as distributed:
        mesh = Mesh(how.mesh, distributed.device)
        blueprint = build_blueprint(recipe)
        found = {"peak_bytes": 0, "reading_bytes": 0, "weight_bytes": 0, "state_bytes": 0}
        if loads:
            watched = blueprint.initialise = _Watched(blueprint.initialise)
            built = parallelize(blueprint, how, mesh, seed=0, group_parameters=lambda names: dict.fromkeys(names, 0))
            held = built.stores.model_state_bytes()
            found["weight_bytes"] = held["parameters"] + held["masters"]
            found["state_bytes"] = found["weight_bytes"] + held["gradients"]
            found["reading_bytes"] = watched.most_resident
        return found | {"peak_bytes": _most_resident()}


class _Watched:
    """An initialiser that knows how much was resident when it was read from last."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.most_resident = 0
        self.stored = {name: _WatchedTensor(self, each) for name, each in stored_tensors(inner).items()}

    def __call__(self, name: str, module: torch.nn.Module) -> None:
        self._inner(name, module)


class _WatchedTensor:
    def __init__(self, watch: _Watched, inner: StoredTensor) -> None:
        self._watch, self._inner = watch, inner
        self.shape, self.dtype = inner.shape, inner.dtype

    def read(self, box: Box | None = None) -> torch.Tensor:
        found = self._inner.read(box)
        self._watch.most_resident = _most_resident()
        return found


def _most_resident() -> int:
    """The most memory that this process ever had resident, files that it only maps left in."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "a system without /proc cannot say what was resident"
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
