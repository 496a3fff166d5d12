"""Cells of parity on a GPU: against the CPU in one process, and several ranks on one device against one.

On the CPU the same cells run with `device="cpu"`, which is how the suite is kept working where there is no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from pool import RankPool
from torch import Tensor

from weft.comm.device import device_for_rank
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import (
    ComputePlan,
    ContextParallelPlan,
    DataParallelPlan,
    MemoryPlan,
    MeshPlan,
    MicrobatchPlan,
    PipelineParallelPlan,
    Plan,
    TensorParallelPlan,
)
from weft.config.recipe import (
    BatchRecipe,
    ConvNetShape,
    DataRecipe,
    DataSource,
    DecoderShape,
    EncoderShape,
    ModelRecipe,
    OptimizerRecipe,
    PermitRecipe,
    Recipe,
    RunRecipe,
)
from weft.model.build import build_model
from weft.model.description import facts_of
from weft.run.engine import create_training
from weft.techniques.check import check_plan, check_runnable
from weft.verify.numerics import TOLERANCES, Trial, assemble, compare, one_process, run_trial

BATCH, STEPS = 8, 3
SECONDS = 180.0
"""A cell's limit: the first one on a GPU makes its context and loads its libraries."""
_NOISE = ("*.key.bias",)
"""Gradients that are zero in exact arithmetic: in fp32 and bf16 they are rounding, which has no relative error."""
_ROTARY = ("decoder", "mixture")
ANGLES = 1e-6
"""Rotary angles are fp32 under every precision, and sines of fp32 differ by a unit in the last place
(6e-8) between devices; so in fp64 their gradients agree between devices to this, on one device to the usual 1e-10."""
BF16_FACTOR = 2.0
"""How much farther from fp64 a GPU's bf16 may be than the CPU's: both round every product, in another order."""

MODELS: Mapping[str, ModelRecipe] = {
    "decoder": ModelRecipe(
        shape=DecoderShape(
            num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=96, vocabulary_size=128,
            sequence_length=13, dropout=0.1,
        )
    ),
    "encoder": ModelRecipe(
        shape=EncoderShape(
            num_layers=4, hidden_size=32, num_heads=4, ffn_size=48, vocabulary_size=64, sequence_length=11
        )
    ),
    "convnet": ModelRecipe(shape=ConvNetShape(num_layers=4, channels=8)),
    "mixture": ModelRecipe(
        shape=DecoderShape(
            num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=96, vocabulary_size=128,
            sequence_length=13, dropout=0.1, num_experts=4, top_k=2, shared_experts=1, first_dense_layers=1,
        )
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """A comparison and the limit it is held to."""

    what: str
    difference: float
    limit: float
    worst: str = ""

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # nan is no pass

    def __str__(self) -> str:
        verdict, worst = "ok  " if self.passed else "FAIL", f", {self.worst}" if self.worst else ""
        return f"{verdict} {self.what}: {self.difference:.1e} (limit {self.limit:.0e}{worst})"


def plan_of(*, size: int = 2, zero: int = 0, precision: str = "fp64", device: str = "cuda", **changes: Any) -> Plan:
    """A plan for a batch of `BATCH`: axes, `schedule`, `chunks`, `sequence`, `grid`, `ways`, `recompute` and `offload`
    by name."""
    axes = ("replicate", "shard", "tensor", "pipeline", "context", "expert")
    mesh = MeshPlan(**{axis: changes.get(axis, 1) for axis in axes})
    return Plan(
        mesh=mesh,
        data_parallel=DataParallelPlan(zero=zero, bucket_bytes=16384, first_bucket_bytes=4096),  # type: ignore[arg-type]
        tensor_parallel=TensorParallelPlan(sequence=changes.get("sequence", False), scheme=changes.get("grid", "1d")),
        context_parallel=ContextParallelPlan(scheme=changes.get("ways", "ring")),
        pipeline_parallel=PipelineParallelPlan(
            schedule=changes.get("schedule", "1f1b"), chunks_per_rank=changes.get("chunks", 1)
        ),
        microbatch=MicrobatchPlan(size=size, per_step=BATCH // size // mesh.data),
        memory=replace(
            memory_of(device, changes.get("offload", "none"), changes.get("to", "host"), changes.get("recompute")),
            fused_loss=changes.get("grid") != "3d",  # a cube's logits are sums over ranks
        ),
        compute=ComputePlan(precision=precision, device=device),  # type: ignore[arg-type]
    )


def memory_of(device: str, offload: Any, to: Any = "host", recompute: Any = None) -> MemoryPlan:
    """What waits elsewhere: in the memory of the host, or on a disk, where the CPU stands in for a device, too."""
    place = "disk" if device == "cpu" and offload != "none" else to
    return MemoryPlan(recompute=recompute or "none", offload=offload, offload_to=place)


PLANS: Mapping[str, dict[str, Any]] = {
    "data 2, ZeRO-0": {"replicate": 2},
    "data 2, ZeRO-1": {"shard": 2, "zero": 1},
    "data 2, ZeRO-2": {"shard": 2, "zero": 2},
    "data 2, ZeRO-3": {"shard": 2, "zero": 3},
    "hybrid 2×2, ZeRO-3": {"replicate": 2, "shard": 2, "zero": 3},
    "tensor 2": {"tensor": 2},
    "tensor 2, sequence": {"tensor": 2, "sequence": True},
    "pipeline 2, gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "pipeline 2, 1f1b, recompute": {"pipeline": 2, "recompute": "full"},
    "pipeline 2, interleaved": {"pipeline": 2, "schedule": "interleaved_1f1b", "chunks": 2},
    "pipeline 2, zero bubble": {"pipeline": 2, "schedule": "interleaved_zero_bubble", "chunks": 2},
    "pipeline 2, ZBV": {"pipeline": 2, "schedule": "zbv", "chunks": 2},
    "pipeline 2, DualPipeV": {"pipeline": 2, "schedule": "dualpipev", "chunks": 2},
    "data 2 × tensor 2 × pipeline 2, ZeRO-1": {"shard": 2, "tensor": 2, "pipeline": 2, "zero": 1, "sequence": True},
    "data 2 × pipeline 2, ZeRO-3": {"shard": 2, "pipeline": 2, "zero": 3},
    "data 2, ZeRO-1, optimizer away": {"shard": 2, "zero": 1, "offload": "optimizer"},
    "data 2, ZeRO-2, activations away": {"shard": 2, "zero": 2, "offload": "activations"},
    "data 2, ZeRO-3, recompute, both away": {
        "shard": 2,
        "zero": 3,
        "offload": "optimizer+activations",
        "recompute": "selective",
    },
    "pipeline 2, activations away": {"pipeline": 2, "offload": "activations"},
    "data 2, ZeRO-1, both on a disk": {"shard": 2, "zero": 1, "offload": "optimizer+activations", "to": "disk"},
    "data 2, ZeRO-3, parameters away": {"shard": 2, "zero": 3, "offload": "parameters"},
    "data 2, ZeRO-3, parameters on a disk": {"shard": 2, "zero": 3, "offload": "parameters", "to": "disk"},
    "hybrid 2×2, ZeRO-3, recompute, parameters and activations away": {
        "replicate": 2, "shard": 2, "zero": 3, "size": 1, "recompute": "full", "offload": "parameters+activations",
    },
    "data 2 × context 2 × tensor 2, ZeRO-3, parameters away": {
        "shard": 2, "context": 2, "tensor": 2, "zero": 3, "offload": "parameters",
    },
    "context 2, ring": {"context": 2},
    "context 2, all_gather": {"context": 2, "ways": "all_gather"},
    "context 2, ulysses": {"context": 2, "ways": "ulysses"},
    "context 4, usp": {"context": 4, "ways": "usp"},
    "data 2 × context 2 × tensor 2, ZeRO-3, recompute": {
        "shard": 2, "context": 2, "tensor": 2, "sequence": True, "zero": 3, "recompute": "full",
    },
    "tensor 4, 2-D": {"tensor": 4, "grid": "2d"},
    "tensor 8, 2.5-D": {"tensor": 8, "grid": "2.5d", "size": 4},
    "tensor 8, 3-D": {"tensor": 8, "grid": "3d", "size": 4},
    "mixture: expert 2": {"shard": 2, "expert": 2},
    "mixture: data 4 × expert 2, ZeRO-1": {"shard": 4, "expert": 2, "zero": 1, "size": 1},
    "mixture: data 2 × context 2 × expert 4": {"shard": 2, "context": 2, "expert": 4},
    "mixture: pipeline 2 × data 2 × context 2 × expert 2": {"pipeline": 2, "shard": 2, "context": 2, "expert": 2},
    "convnet: tensor 2": {"tensor": 2, "size": 8},
}  # fmt: skip
"""Several ranks on one device.  Every technique, every schedule, and three dimensions.  What is away waits on the
host.  A name may begin with that of its model, which is else the decoder."""
HALVES = (
    "data 2, ZeRO-3, parameters away",
    "context 2, ring",
    "context 2, ulysses",
    "mixture: expert 2",
    "tensor 2, sequence",
    "tensor 4, 2-D",
)
"""Plans that are compared in bf16, too: attention that returns its log-sum-exp, and grouped products."""


def recipe_of(model: str, precision: str) -> Recipe:
    return Recipe(
        model=MODELS[model],
        data=DataRecipe(train=(DataSource(source="synthetic"),)),
        batch=BatchRecipe(global_batch_size=BATCH),
        optimizer=OptimizerRecipe(learning_rate=1e-3, weight_decay=0.1, epsilon=1e-6, max_grad_norm=0.5),
        run=RunRecipe(steps=STEPS, seed=7),
        permit=PermitRecipe(precision=(precision,)),  # type: ignore[arg-type]
    )


def rank_trial(recipe: Recipe, plan: Plan) -> Trial:
    """One rank of a cell; its tensors come home on the CPU.  Device indices are the ranks', modulo what there is."""
    torch.backends.cudnn.allow_tf32 = False  # torch's default for convolutions; a comparison wants fp32 products
    device = device_for_rank(plan.compute.device, torch.distributed.get_rank())
    trial = run_trial(recipe, plan, lambda: build_model(recipe), steps=STEPS, device=device)
    trial.gradients = [replace(stored, tensor=stored.tensor.cpu()) for stored in trial.gradients]
    trial.state = [replace(stored, tensor=stored.tensor.cpu()) for stored in trial.state]
    return trial


def initial_weights(recipe: Recipe, plan: Plan) -> dict[str, Tensor]:
    """Masters and buffers of one process before its first step, on the CPU."""
    device = device_for_rank(plan.compute.device, 0)
    training = create_training(recipe, plan, build_model(recipe), Mesh(plan.mesh, device), Recorder())
    held = [stored for stored in training.checkpoint_shards() if stored.name.startswith(("model/", "buffer/"))]
    return {stored.name: stored.tensor.cpu() for stored in held}


@dataclass(slots=True)
class Cells:
    """Runs cells on `device`, each reference once."""

    ranks: RankPool
    device: str
    _known: dict[tuple[str, str, str], Trial] = field(default_factory=dict[tuple[str, str, str], Trial], init=False)

    def one(self, model: str, precision: str, device: str) -> Trial:
        """One process, everything in one microbatch."""
        key = (model, precision, device)
        if key not in self._known:
            plan = one_process(plan_of(precision=precision, device=device))
            self._known[key] = self.run(model, precision, plan)[0]
        return self._known[key]

    def run(self, model: str, precision: str, plan: Plan) -> list[Trial]:
        recipe = recipe_of(model, precision)
        check_plan(plan, recipe, facts_of(recipe), plan.mesh.world_size)
        check_runnable(plan)
        return self.ranks.run(plan.mesh.world_size, rank_trial, recipe, plan, timeout=SECONDS)

    def same_weights(self, model: str, precision: str) -> Verdict:
        """Whether the device starts from the CPU's bits."""
        recipe = recipe_of(model, precision)
        found = [
            self.ranks.run(1, initial_weights, recipe, one_process(plan_of(precision=precision, device=device)))[0]
            for device in ("cpu", self.device)
        ]
        different = [name for name in found[0] if not torch.equal(found[0][name], found[1][name])]
        same_names = found[0].keys() == found[1].keys()
        return Verdict(f"{model}, {precision}: initial weights as on the CPU, tensors that differ",
                       float(len(different)) if same_names else math.inf, 0.0, ", ".join(different[:3]))  # fmt: skip

    def against_cpu(self, model: str, precision: str) -> list[Verdict]:
        """One process on the device against one on the CPU."""
        here, there = self.one(model, precision, self.device), self.one(model, precision, "cpu")
        if precision == "bf16":
            return [self._bf16(model, [here], there, f"{model}, bf16, device against CPU")]
        limit = max(TOLERANCES[precision], ANGLES if model in _ROTARY else 0.0)
        return _verdicts(f"{model}, {precision}, device against CPU", [there], [here], limit, skip=precision != "fp64")

    def against_one(self, name: str, precision: str = "fp64") -> list[Verdict]:
        """Several ranks on the device against one process on it."""
        model = _model_of(name)
        plan = plan_of(precision=precision, device=self.device, **PLANS[name])
        found = self.run(model, precision, plan)
        reference = self.one(model, precision, self.device)
        what = f"{model}, {precision}, {name} against one process"
        if precision == "bf16":
            return [self._bf16(model, found, reference, what)]
        return _verdicts(what, [reference], found, TOLERANCES[precision], skip=precision != "fp64")

    def _bf16(self, model: str, here: Sequence[Trial], there: Trial, what: str) -> Verdict:
        """How much farther `here` is from fp64 than `there` is."""
        exact = assemble([self.one(model, "fp64", "cpu").gradients])
        found = (assemble([trial.gradients for trial in here]), assemble([there.gradients]))
        errors = [_whole_error(exact, gradients) for gradients in found]
        return Verdict(f"{what}: error against fp64, a multiple of its", errors[0] / errors[1], BF16_FACTOR)


def _model_of(name: str) -> str:
    """The model that a plan of `PLANS` is for."""
    model, named, _ = name.partition(": ")
    return model if named else "decoder"


def _verdicts(
    what: str, reference: Sequence[Trial], found: Sequence[Trial], limit: float, *, skip: bool
) -> list[Verdict]:
    """Gradients of the first step per tensor, and all losses.  `skip` leaves gradients of pure noise out."""
    wanted, got = (_judged(assemble([trial.gradients for trial in trials]), skip) for trials in (reference, found))
    worst = compare(wanted, got)[0]
    losses = reference[0].losses
    agree = all(trial.losses == found[0].losses for trial in found)
    farthest = max(abs(a - b) / abs(a) for a, b in zip(losses, found[0].losses, strict=True)) if agree else math.inf
    return [
        Verdict(f"{what}: gradients", worst.relative, limit, worst.name),
        Verdict(f"{what}: losses of {len(losses)} steps", farthest, limit),
    ]


def _judged(gradients: Mapping[str, Tensor], skip: bool) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in gradients.items()
        if not (skip and any(fnmatchcase(name, pattern) for pattern in _NOISE))
    }


def _whole_error(exact: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    delta = sum(float((exact[name] - found[name]).square().sum()) for name in exact)
    return math.sqrt(delta / sum(float(tensor.square().sum()) for tensor in exact.values()))
