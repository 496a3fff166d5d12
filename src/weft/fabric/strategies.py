"""Fabric's strategies: each becomes a plan, option by option, or says which option it does not take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from weft.config.plan import ComputePlan, Plan, parse_plan
from weft.errors import RecipeError
from weft.fabric._absent import DEVICES, absent
from weft.run.launch import RankInfo

_FREE = (
    "accelerator parallel_devices cluster_environment process_group process_group_backend"
    " start_method find_unused_parameters static_graph gradient_as_bucket_view broadcast_buffers bucket_cap_mb"
    " init_sync auto_wrap_policy state_dict_type use_orig_params sync_module_states limit_all_gathers"
    " forward_prefetch backward_prefetch device_id allgather_partitions reduce_scatter overlap_comm"
    " contiguous_gradients pin_memory allgather_bucket_size reduce_bucket_size sub_group_size logging_level"
    " zero_optimization load_full_weights parallelize_fn save_distributed_checkpoint"
    " zero_allow_untrained_optimizer"
)
"""Options that say how Fabric does what a session does in its own way."""
_INSTEAD: Mapping[str, str] = {
    "checkpoint_io": "fabric.save writes folders that any plan loads.",
    "precision": 'Say it by Fabric(precision="bf16-mixed") or "bf16-true".',
    "mixed_precision": 'Say it by Fabric(precision="bf16-mixed") or "bf16-true".',
    "cpu_offload": 'Give Fabric a plan with memory.offload = "optimizer".',
    "offload_parameters": "Weights stay on devices: use stage 3 on more ranks.",
    "config": "`weft migrate ds_config.json` makes a plan of it, for Fabric(plan=…).",
}


class Strategy:
    """How ranks share the work.  This one leaves it to the fastest plan that is found."""

    root_device = torch.device("cpu")
    """This rank's device, once the ranks are joined."""
    world_size, global_rank = 1, 0
    obeyed: tuple[str, ...] = ()
    """Options that the plan has."""

    def __init__(self, timeout: timedelta | None = None, **options: Any) -> None:
        self._compute = ComputePlan() if timeout is None else ComputePlan().waiting(timeout.total_seconds())
        self._given = {name: value for name, value in options.items() if value is not None and value is not False}
        for name in self._given.keys() - {*_FREE.split(), *self.obeyed}:
            raise RecipeError(f"{type(self).__name__}({name}=…) is not had. {_INSTEAD.get(name, 'Leave it out.')}")

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    def plan(self, ranks: int) -> Plan | None:
        """Return the plan for so many ranks; None: what is found."""
        del ranks
        return None

    def _sharing(self, ranks: int, stage: int, shard: int | None = None, memory: str = "") -> Plan:
        shard = (shard or ranks) if stage == 3 else 1
        if ranks % shard:
            raise RecipeError(f"{type(self).__name__} shards over {shard} ranks, which do not divide {ranks}.")
        return self._read(f"[mesh]\nreplicate = {ranks // shard}\nshard = {shard}", stage, memory)

    def _read(self, mesh: str, stage: int, memory: str = "") -> Plan:
        plan = parse_plan(f"{mesh}\n[data_parallel]\nzero = {stage}\n[memory]\n{memory}", name=type(self).__name__)
        return replace(plan, compute=self._compute)


class SingleDeviceStrategy(Strategy):
    """One process."""


class DDPStrategy(Strategy):
    """Every rank has the whole model."""

    def plan(self, ranks: int) -> Plan | None:
        return self._sharing(ranks, 0)


class FSDPStrategy(Strategy):
    """Every rank has a part of each weight."""

    obeyed = ("sharding_strategy", "device_mesh", "activation_checkpointing", "activation_checkpointing_policy")

    def plan(self, ranks: int) -> Plan | None:
        strategy = self._given.get("sharding_strategy", "FULL_SHARD")
        word = str(getattr(strategy, "name", strategy)).upper()
        stage = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}.get(word)
        if stage is None:
            raise RecipeError(f"FSDPStrategy(sharding_strategy={word!r}) is not had. Use FULL_SHARD or HYBRID_SHARD.")
        recomputes = any(name.startswith("activation") for name in self._given)
        mesh = self._given.get("device_mesh", (1, _of_host(ranks)))
        if not isinstance(mesh, tuple):
            raise RecipeError("FSDPStrategy(device_mesh=…) is not a tuple. Give (replicas, shards).")
        shard = mesh[1] if word == "HYBRID_SHARD" else None
        return self._sharing(ranks, stage, shard, 'recompute = "full"' if recomputes else "")


class DeepSpeedStrategy(Strategy):
    """ZeRO by its stage, 2 where none is said."""

    obeyed = ("stage", "offload_optimizer")

    def plan(self, ranks: int) -> Plan | None:
        offload = 'offload = "optimizer"' if "offload_optimizer" in self._given else ""
        return self._sharing(ranks, self._given.get("stage", 2), memory=offload)


class ModelParallelStrategy(Strategy):
    """Layers split over tensor ranks, which is found by looking, and weights sharded over data ranks."""

    obeyed = ("data_parallel_size", "tensor_parallel_size")

    def __init__(self, parallelize_fn: Any = None, **options: Any) -> None:
        super().__init__(**options)

    def plan(self, ranks: int) -> Plan | None:
        data, tensor = (self._given.get(name, "auto") for name in self.obeyed)
        if tensor == "auto":
            tensor = _of_host(ranks) if data == "auto" else ranks // data
        data = ranks // tensor if data == "auto" else data
        if data * tensor != ranks:
            raise RecipeError(f"ModelParallelStrategy has {data} × {tensor} ranks, and the job has {ranks}.")
        return self._read(f"[mesh]\nshard = {data}\ntensor = {tensor}", 3 if data > 1 else 0)


def _of_host(ranks: int) -> int:
    info = RankInfo.from_environment()
    return ranks if info is None else info.local_world_size


def strategy_of(given: Any) -> Strategy:
    """Return the strategy that `Fabric(strategy=…)` names.

    Raises:
        RecipeError: it is no strategy, or none that is had.
    """
    match str(given).split("_"):
        case _ if isinstance(given, Strategy):
            return given
        case ["auto"]:
            return Strategy()
        case (
            ["ddp"] | ["ddp", "find", "unused", "parameters", "true" | "false"] | ["ddp", "spawn" | "fork" | "notebook"]
        ):
            return DDPStrategy()
        case ["fsdp"] | ["fsdp", "cpu", "offload"] as words:
            return FSDPStrategy(cpu_offload=len(words) > 1)
        case ["deepspeed"]:
            return DeepSpeedStrategy()
        case ["deepspeed", "stage", ("1" | "2" | "3") as stage, *offload] if offload in ([], ["offload"]):
            return DeepSpeedStrategy(
                stage=int(stage), offload_optimizer=bool(offload), offload_parameters=stage == "3" and bool(offload)
            )
        case _:
            raise RecipeError(
                f'Fabric(strategy={given!r}) is not had. Use "auto", "ddp", "fsdp", "deepspeed_stage_1" to "…_3", or an'
                " object of weft.fabric.strategies."
            )


__getattr__ = absent(
    __name__,
    {
        "Start a process for each device: `weft launch -n N script.py`.": "DataParallelStrategy",
        "Use DDPStrategy, FSDPStrategy, DeepSpeedStrategy or ModelParallelStrategy.": "ParallelStrategy",
        DEVICES: "XLAStrategy XLAFSDPStrategy SingleDeviceXLAStrategy",
    },
)
