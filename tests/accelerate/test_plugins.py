"""Plugins become a plan, key by key: each setting is obeyed, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from pool import RankPool

from weft.accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    opening,
)
from weft.accelerate.utils import TorchDynamoPlugin, TorchTensorParallelPlugin, set_seed
from weft.errors import RecipeError, WeftError

CONFIGURATION = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}
PLANS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full shard": ({"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="FULL_SHARD")}, {"zero": 3}),
    "by default": ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, {"zero": 3, "shard": 2}),
    "by number": ({"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy=2)}, {"zero": 2, "replicate": 2}),
    "kept": ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)}, {"zero": 2}),
    "recomputed": (
        {"fsdp_plugin": FullyShardedDataParallelPlugin(activation_checkpointing=True)},
        {"zero": 3, "recompute": "full"},
    ),
    "stage 1": ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1)}, {"zero": 1, "replicate": 2}),
    "stage 3 offloaded": (
        {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu")},
        {"zero": 3, "offload": "optimizer"},
    ),
    "configuration": (
        {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=CONFIGURATION)},
        {"zero": 2, "precision": "bf16"},
    ),
    "tensor": ({"parallelism_config": ParallelismConfig(tp_size=2)}, {"tensor": 2}),
    "tensor plugin": ({"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=2)}, {"tensor": 2}),
    "compiled": (
        {"fsdp_plugin": FullyShardedDataParallelPlugin(), "dynamo_backend": "inductor"},
        {"zero": 3, "compile": True},
    ),
}
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "ZeRO-2 in hosts": ({"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy=5)}, "HYBRID_SHARD_ZERO2"),
    "weights on the host": ({"fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=True)}, "fsdp_offload_params"),
    "ignored": ({"fsdp_plugin": FullyShardedDataParallelPlugin(ignored_modules=[1])}, "ignored_modules"),
    "an unknown key": (
        {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config={**CONFIGURATION, "zero_optimisation": {}})},
        "zero_optimisation",
    ),
    "weights elsewhere": (
        {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu")},
        "offload_param",
    ),
    "two engines": ({"deepspeed_plugins": {"a": DeepSpeedPlugin(), "b": DeepSpeedPlugin()}}, "2 DeepSpeedPlugins"),
    "Megatron-LM": ({"megatron_lm_plugin": object()}, "megatron_lm_plugin"),
    "another compiler": ({"dynamo_plugin": TorchDynamoPlugin(backend="tvm")}, "dynamo_backend = TVM"),
    "eight bits": ({"mixed_precision": "fp8"}, "fp8"),
    "a hook": ({"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="fp16")]}, "comm_hook='fp16'"),
}


def plan_of(given: dict[str, Any]) -> dict[str, Any]:
    with opening(record=False, quiet=True):
        accelerator = Accelerator(**given)
        plan = accelerator.plan
        accelerator.end_training()
    sections = (plan.mesh, plan.data_parallel, plan.memory, plan.compute)
    return {name: getattr(section, name) for section in sections for name in dir(section) if not name.startswith("_")}


@pytest.mark.parametrize("name", PLANS)
def test_a_plugin_is_a_plan(ranks: RankPool, name: str) -> None:
    given, expected = PLANS[name]
    for found in ranks.run(2, plan_of, given):
        assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_named(ranks: RankPool, name: str) -> None:
    given, word = REFUSED[name]
    with pytest.raises(WeftError, match=word):
        ranks.run(1, plan_of, given)


def test_a_seed_of_each_process_is_refused() -> None:
    with pytest.raises(RecipeError, match="device_specific"):
        set_seed(1, device_specific=True)


def second() -> None:
    with opening(record=False, quiet=True):
        first = Accelerator()
        assert Accelerator().state.num_processes == first.num_processes == 1  # they share the session
        import torch

        first.prepare(torch.nn.Linear(2, 2))
        try:
            Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
        finally:
            first.end_training()


def test_a_second_one_shares_the_session(ranks: RankPool) -> None:
    with pytest.raises(RecipeError, match="another plan than the first"):
        ranks.run(1, second)


def own_batches(split: bool) -> list[int]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    with opening(record=False, quiet=True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12)), batch_size=4))
        sizes = [len(rows) for (rows,) in loader]
        accelerator.end_training()
    return sizes


def test_a_batch_is_the_global_one_unless_it_is_said_to_be_each_processs(ranks: RankPool) -> None:
    assert ranks.run(2, own_batches, True) == [[2, 2, 2]] * 2
    assert ranks.run(2, own_batches, False) == [[4, 2]] * 2
