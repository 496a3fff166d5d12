"""Trainings of one Mixtral of `transformers`: Weft under any plan, and a careful person's `fully_shard`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks._handwritten import adamw, step_of
from benchmarks._llama import POOL, SEED, rank, samples_of, world_size
from benchmarks._weft import LEARNING_RATE, shared_pool
from weft.comm.device import backend_for
from weft.comm.mesh import Mesh
from weft.comm.shared_memory import register_shared_memory_backend
from weft.comm.telemetry import Recorder
from weft.config.plan import (
    ComputePlan,
    ExpertParallelPlan,
    MeshPlan,
    MicrobatchPlan,
    Plan,
    dump_plan,
    parse_plan,
)
from weft.config.recipe import BatchRecipe, ModelRecipe, OptimizerRecipe, PermitRecipe, Recipe, RunRecipe
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.run.engine import create_training
from weft.techniques.core import ModelLayout, ParameterLayout, materialise
from weft.techniques.expert import exchange, runtime

CONFIG: dict[str, Any] = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192,
    "max_position_embeddings": 256, "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    "sliding_window": None, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
"""The tiny Llama of the other benchmarks with 8 experts in place of each feed-forward, of which a token visits two."""
BATCH, RANKS = 4, 2
SAMPLES = {"vocabulary_size": CONFIG["vocab_size"], "sequence_length": 256}


def recipe_of(folder: str, precision: tuple[str, ...]) -> Recipe:
    """The training; `folder` has the model's `config.json`."""
    return Recipe(
        model=ModelRecipe(hf=folder, sequence_length=SAMPLES["sequence_length"]),
        batch=BatchRecipe(global_batch_size=BATCH * RANKS),
        optimizer=OptimizerRecipe(learning_rate=LEARNING_RATE, betas=(0.9, 0.95), max_grad_norm=None),
        run=RunRecipe(steps=100_000, seed=SEED),
        permit=PermitRecipe(precision=precision),  # pyright: ignore[reportArgumentType]  it checks them
    )


def plan_of_experts(precision: str, expert_parallel: ExpertParallelPlan | None = None) -> str:
    """Two ranks that share out the experts, as TOML."""
    compute = ComputePlan(precision=precision, device="cpu")  # pyright: ignore[reportArgumentType]
    mesh, microbatch = MeshPlan(shard=RANKS, expert=RANKS), MicrobatchPlan(size=BATCH, per_step=1)
    travel = expert_parallel or ExpertParallelPlan()
    plan = Plan(mesh=mesh, microbatch=microbatch, expert_parallel=travel, compute=compute)
    return dump_plan(plan, everything=True)


def weft(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """`settings`: the model's folder, a plan as TOML, precision."""
    plan, recipe = parse_plan(settings["plan"]), recipe_of(settings["folder"], (settings["precision"],))
    _join(plan)
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    training = create_training(recipe, plan, build_model(recipe), mesh, Recorder())
    torch.set_num_threads(plan.compute.threads_per_rank)
    pool = shared_pool(SAMPLES, plan, mesh.index("data"))

    def step(index: int) -> float:
        return training.stepper(pool[index % len(pool)], step=index, learning_rate=LEARNING_RATE).loss

    return step


def _join(plan: Plan) -> None:
    if world_size() > 1:
        backend = backend_for(torch.device("cpu"), wanted=plan.compute.backend)
        if "weft" in backend:
            register_shared_memory_backend()
        dist.init_process_group(backend)


def _blueprint(settings: Mapping[str, Any]) -> Blueprint:
    """The model as Weft begins it."""
    blueprint = build_model(recipe_of(settings["folder"], ("fp32",)))
    module = blueprint.module
    named = module.named_parameters()
    layout = ModelLayout({name: ParameterLayout(name=name, shape=parameter.shape) for name, parameter in named})
    materialise(module, blueprint, layout, SEED, torch.device("cpu"), torch.float32)
    return blueprint


def fsdp(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """`settings`: the model's folder, precision, `experts` (the library's implementation), reshard, compile."""
    import transformers

    dist.init_process_group("gloo")
    weights = _blueprint(settings).module.state_dict()
    config = transformers.AutoConfig.from_pretrained(settings["folder"])
    config.use_cache = False
    module: Any = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", experts_implementation=settings["experts"], dtype=torch.float32
    )
    module.load_state_dict(weights)
    module.train()
    narrow = settings["precision"] == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if narrow else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (world_size(),))
    for unit in [*module.model.layers, module]:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=bool(settings.get("reshard")))
    optimizer, pool = adamw(module, {"fused": True}), _own_pool()

    def logits_of(tokens: Tensor) -> Tensor:
        return module(input_ids=tokens).logits

    return step_of(logits_of, module, optimizer, pool)


def _own_pool() -> list[dict[str, Tensor]]:
    """This rank's samples of every step: its part of those of all, as they are drawn for the batch of all."""
    whole, first = BATCH * world_size(), BATCH * rank()
    batches = (samples_of(SAMPLES, range(step * whole, (step + 1) * whole)) for step in range(POOL))
    return [{name: value[first : first + BATCH] for name, value in batch.items()} for batch in batches]


# ── the layer alone ──────────────────────────────────────────────────────────────────────────────────────────────────


_FUNCTIONS = ("arrange", "spread", "combine", "find_route", "leave", "arrive")
"""What permutes and sends in a forward; the same names in the backward are of autograd functions."""


class _Clock:
    """Seconds within functions that are told to be watched."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - start

        return timed


def layer(settings: Mapping[str, Any]) -> Callable[[int], float]:
    """A step is forward and backward of one mixture; what it answers is the share of permuting and sending in it."""
    from weft.model.reference import mixture

    clock, plan = _Clock(), parse_plan(settings["plan"])
    for name in _FUNCTIONS:
        setattr(runtime, name, clock.around(getattr(runtime, name)))
    for owner, names in ((mixture, ("_Spread", "_Combine")), (exchange, ("_Leave", "_Arrive"))):
        for name in names:
            function = getattr(owner, name)
            function.backward = staticmethod(clock.around(function.backward))
    recipe = recipe_of(settings["folder"], (settings["precision"],))
    _join(plan)
    training = create_training(recipe, plan, build_model(recipe), Mesh(plan.mesh, torch.device("cpu")), Recorder())
    block = training.model.parts[0].module.get_submodule("model.layers.0.mlp")
    tokens = torch.randn(BATCH, SAMPLES["sequence_length"], CONFIG["hidden_size"])
    if settings["precision"] == "bf16":
        tokens = tokens.bfloat16()
    tokens.requires_grad_()

    def step(index: int) -> float:
        dist.barrier()
        clock.seconds, start = 0.0, time.perf_counter()
        made = block(tokens)
        made.backward(made.detach())
        return clock.seconds / (time.perf_counter() - start)

    return step


def write_config() -> Path:
    """Write the model's configuration into a new folder."""
    import json

    folder = Path(tempfile.mkdtemp(prefix="weft-mixtures-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
