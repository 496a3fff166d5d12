"""LoRA on a billion parameters: two ranks fine-tune a folder of sharded safetensors, and `peft` loads what they export.

The random Llama of `benchmarks.loading`, in bf16 and in shards, is trained for a few steps by two ranks, under data
parallelism and under tensor parallelism.  Then the whole model with Weft's checkpoint, and the folder's model with the
exported adapter, as `peft` loads it, compute logits of the same tokens.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks.loading import CONFIG, SHARD, write_model
from weft.analysis.blueprint import build_blueprint
from weft.api import load_module
from weft.config.plan import parse_plan
from weft.config.recipe import Recipe, parse_recipe

PLANS = {
    "data 2": "[mesh]\nreplicate = 2\n[microbatch]\nper_step = 1\n",
    "tensor 2": "[mesh]\ntensor = 2\n[microbatch]\nsize = 2\nper_step = 1\n",
}
_ADAPTER = {"method": "lora", "rank": 16, "alpha": 32.0, "targets": ["all-linear"]}
_STEPS = 3
_TOLERANCE = 1e-4
"""Of logits in fp32, whose size is about one: 19 blocks of products of 2,048 numbers, in another order of sums."""


def main() -> None:
    parser = options_parser(__doc__, rounds=None)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"], help="blocks of the model")
    options = parser.parse_args()
    about = {"machine": machine(), "versions": versions("transformers", "peft"), "note": options.note}
    folder = Path(tempfile.mkdtemp(prefix="weft-adapters-"))
    try:
        parameters, _ = write_model(folder / "base", options.layers)
        samples: dict[str, Any] = {"parameters": parameters}
        for name, plan in PLANS.items():
            samples[name] = _fine_tune(folder, plan)
            log(f"{name}: {samples[name]}")
    finally:
        shutil.rmtree(folder)
    goals = [
        Goal(
            what=f"largest difference of a logit between Weft and peft, {name}",
            measured=samples[name]["logit_difference"],
            goal=_TOLERANCE,
            better="lower",
        )
        for name in PLANS
    ]
    settings = {"config": {**CONFIG, "num_hidden_layers": options.layers}, "plans": PLANS, "shards": SHARD}
    settings |= {"adapter": _ADAPTER, "steps": _STEPS}
    write_result("adapters", goals=goals, samples=samples, about={**about, "settings": settings}, folder=options.folder)


def _recipe(base: Path) -> Recipe:
    adapter = "\n".join(f"{name} = {value!r}".replace("'", '"') for name, value in _ADAPTER.items())
    return parse_recipe(
        f'[model]\nhf = "{base}"\nsequence_length = 32\n[model.adapter]\n{adapter}\n'
        f"[batch]\nglobal_batch_size = 2\n[optimizer]\nlearning_rate = 0.01\n[run]\nsteps = {_STEPS}\n"
        '[data]\ntrain = [{ source = "synthetic" }]\n'
    )


def _fine_tune(folder: Path, plan: str) -> dict[str, Any]:
    """Train under a plan; return losses, what was exported, and how far peft's logits are from Weft's."""
    recipe, run = _recipe(folder / "base"), folder / "run"
    result = weft.train(recipe, parse_plan(plan), folder=run, quiet=True)
    assert result.export is not None
    tokens = torch.randint(0, CONFIG["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        ours = _logits(load_module(run, build_blueprint(recipe)), tokens)
        base = _base(folder / "base")
        before = _logits(base, tokens)
        theirs = _logits(_with_adapter(base, result.export), tokens)
    exported = sum(path.stat().st_size for path in result.export.iterdir())
    shutil.rmtree(run)
    return {
        "losses": [float(loss) for loss in result.losses],
        "exported_bytes": exported,
        "logit_difference": (ours - theirs).abs().max().item(),
        "logits_moved_by": (ours - before).abs().max().item(),
    }


def _base(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _with_adapter(base: Any, adapter: Path) -> Any:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what peft reads of transformers
        return peft.PeftModel.from_pretrained(base, adapter)


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    found = model.eval()(input_ids=tokens).logits
    gc.collect()
    return found


if __name__ == "__main__":
    main()
