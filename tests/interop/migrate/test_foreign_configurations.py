"""Configurations of DeepSpeed and Accelerate: each key is obeyed, translated or refused by its name."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.cli import main
from weft.config.plan import parse_plan
from weft.errors import RecipeError
from weft.interop.migrate import ForeignKey, Migration, keys_of, read_config

ACCELERATE_KEYS, DEEPSPEED_KEYS = keys_of("accelerate"), keys_of("deepspeed")

# Keys that DeepSpeed's pages and its own code name, by section.
DOCUMENTED: Mapping[str, str] = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps dataloader_drop_last"
    " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer gradient_clipping communication_data_type"
    " prescale_gradients gradient_predivide_factor gradient_allreduce_op sparse_gradients steps_per_print"
    " wall_clock_breakdown expert_parallel sequence_parallel_size elasticity autotuning flops_profiler comms_logger"
    " tensorboard wandb csv_monitor aio curriculum_learning data_efficiency compression_training amp dump_state",
    "optimizer": "type",
    "optimizer.params": "lr betas eps weight_decay torch_adam adam_w_mode freeze_step momentum",
    "scheduler": "type",
    "scheduler.params": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps cos_min_ratio",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis"
    " min_loss_scale",
    "bf16": "enabled immediate_grad_update",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype",
    "zero_optimization": "stage overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size"
    " allgather_partitions allgather_bucket_size round_robin_gradients sub_group_size stage3_prefetch_bucket_size"
    " stage3_param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance"
    " stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save zero_hpz_partition_size"
    " zero_quantized_weights zero_quantized_gradients mics_shard_size leaf_module cpu_offload",
    "zero_optimization.offload_optimizer": "device nvme_path pin_memory buffer_count ratio pipeline_read"
    " pipeline_write fast_init",
    "zero_optimization.offload_param": "device nvme_path pin_memory buffer_count buffer_size max_in_cpu",
    "activation_checkpointing": "partition_activations cpu_checkpointing contiguous_memory_optimization"
    " number_checkpoints synchronize_checkpoint_boundary profile",
    "tensor_parallel": "autotp_size partition_config",
    "pipeline": "stages partition seed_layers activation_checkpoint_interval",
    "checkpoint": "load_universal tag_validation use_node_local_storage",
    "compile": "deepcompile",
}
NAMED = [f"{section}.{name}".lstrip(".") for section, names in DOCUMENTED.items() for name in names.split()]


def values_of(key: ForeignKey) -> list[Any]:
    """Values of the kind that a key takes; anything where it takes anything."""
    if key.choices:
        return list(key.choices)
    examples = {bool: [True, False], int: [0, 1, 2, 8], float: [0.0, 0.5], str: ["AdamW"], list: [[0.9, 0.99]]}
    results = [value for kind in key.takes for value in examples.get(kind, [])]
    return [*(results or [True, 3, "text", {"enabled": True}]), *key.harmless]


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in flat.items():
        here = table
        *path, last = name.split(".")
        for part in path:
            here = here.setdefault(part, {})
        here[last] = value
    return table


def read(folder: Path, table: Mapping[str, Any], *, processes: int | None = 4, **fill: Any) -> Migration:
    path = folder / "given.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    return read_config(path, processes=processes, fill=fill)


def outcome(folder: Path, flat: Mapping[str, Any], **more: Any) -> tuple[Migration | None, str]:
    """What was made of a configuration; or nothing, and why."""
    try:
        migration = read(folder, nested(flat), **more)
    except RecipeError as error:
        return None, str(error)
    return migration, " ".join([*migration.reasons.values(), *migration.notes])


def check_round_trip(migration: Migration) -> None:
    assert parse_plan(migration.plan_toml()) == dataclasses.replace(migration.plan, origins={})
    sections = tomllib.loads(migration.recipe_toml())  # a part of a recipe, whose own checks have read it already
    written = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    assert written == migration.recipe


def test_every_documented_key_is_known() -> None:
    assert [name for name in NAMED if name not in DEEPSPEED_KEYS] == []


@pytest.mark.parametrize("keys", [DEEPSPEED_KEYS, ACCELERATE_KEYS], ids=["deepspeed", "accelerate"])
def test_a_refusal_says_what_to_write(keys: Mapping[str, ForeignKey]) -> None:
    refusals = {name: key.says for name, key in keys.items() if key.outcome == "refused"}
    assert {name: says for name, says in refusals.items() if "rite " not in says and "eave " not in says} == {}


@pytest.mark.parametrize("name", sorted(DEEPSPEED_KEYS))
def test_a_key_of_deepspeed_is_obeyed_translated_or_refused_by_name(tmp_path: Path, name: str) -> None:
    """Alone in a small configuration, with each value of its kind."""
    key = DEEPSPEED_KEYS[name]
    for value in values_of(key):
        flat: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, name: value}
        if name.startswith("optimizer."):
            flat.setdefault("optimizer.type", "AdamW")
        migration, text = outcome(tmp_path, flat)
        if migration is None:
            # A size that does not fit is refused by its name, too: 0 ranks, 3 of 4.
            short = name.rpartition(".")[2]
            assert short in text or ("batch_size" in short and "batch" in text), (value, text)
            assert key.outcome != "refused" or "rite " in text or "eave " in text, text
        else:
            asks_for_nothing = value in key.harmless or value in (False, None) or key.joins
            assert name in text or asks_for_nothing, (value, text)
            check_round_trip(migration)
    assert key.outcome != "refused" or key.says


@pytest.mark.parametrize("name", sorted(ACCELERATE_KEYS))
def test_a_key_of_accelerate_is_obeyed_translated_or_refused_by_name(tmp_path: Path, name: str) -> None:
    key = ACCELERATE_KEYS[name]
    kinds = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
    kind = kinds.get(name.split(".")[0], "FSDP" if name.startswith("parallelism") else "MULTI_GPU")
    for value in values_of(key):
        flat = {"distributed_type": kind, "num_processes": 8, name: value}
        migration, text = outcome(tmp_path, flat, processes=None, batch_size=2)
        if migration is None:
            short = name.rpartition(".")[2]
            shard = f"shard {value}" in text and name.endswith("dp_shard_size")
            assert short in text or value == "AdamW" or shard, (value, text)
        else:
            asks_for_nothing = value in key.harmless or value in (False, None) or key.joins
            assert name in text or asks_for_nothing, (value, text)
            check_round_trip(migration)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_drawn_configurations_become_a_plan_or_name_what_stands_in_the_way(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Every key drawn is in a comment, joins others, asks for nothing, or is named by the refusal."""
    names = data.draw(st.lists(st.sampled_from(sorted(DEEPSPEED_KEYS)), max_size=6, unique=True))
    flat: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
    for name in names:
        if not any(other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in flat):
            flat[name] = data.draw(st.sampled_from([*values_of(DEEPSPEED_KEYS[name]), "auto"]))
    migration, text = outcome(tmp_path_factory.getbasetemp(), flat)
    if migration is None:
        assert text.startswith("given.json cannot be migrated as it is:\n  ")
        return
    check_round_trip(migration)
    for name, value in flat.items():
        key = DEEPSPEED_KEYS[name]
        assert name in text or key.joins or value in key.harmless or value in (False, None), name


def test_accelerates_own_fields_are_all_known() -> None:
    arguments = pytest.importorskip("accelerate.commands.config.config_args")
    fields = {field.name for field in dataclasses.fields(arguments.ClusterConfig)}
    sections = {name.split(".")[0] for name in ACCELERATE_KEYS}
    assert fields - sections == set()


# ── chosen ones ───────────────────────────────────────────────────────────────────────────────────────────────────────

TRAINER: Mapping[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
"""The configuration that transformers' pages begin with."""


def test_auto_is_what_training_arguments_have(tmp_path: Path) -> None:
    migration = read(tmp_path, TRAINER, processes=8)
    assert (migration.plan.mesh.shard, migration.plan.data_parallel.zero) == (8, 3)
    assert (migration.plan.microbatch.size, migration.plan.microbatch.per_step) == (8, 1)
    assert migration.plan.compute.precision == "fp32"
    recipe = migration.recipe
    assert recipe["batch.global_batch_size"] == 64
    assert recipe["optimizer.learning_rate"] == 5e-5
    assert recipe["optimizer.betas"] == [0.9, 0.999]
    assert recipe["optimizer.max_grad_norm"] == 1.0
    assert "run.steps" not in recipe
    assert any("per_device_train_batch_size" in note for note in migration.notes)


def test_auto_takes_what_is_filled_in_by_either_name(tmp_path: Path) -> None:
    filled = {"learning_rate": 3e-4, "per_device_train_batch_size": 2, "bf16.enabled": True, "max_steps": 50}
    migration = read(tmp_path, TRAINER, processes=2, **filled)
    assert migration.recipe["optimizer.learning_rate"] == 3e-4
    assert migration.recipe["batch.global_batch_size"] == 4
    assert migration.recipe["permit.precision"] == ["fp32", "bf16"]
    assert migration.recipe["run.steps"] == 50
    with pytest.raises(RecipeError, match="fills no such key. Did you mean learning_rate"):
        read(tmp_path, TRAINER, processes=2, learning_rat=1)


def test_auto_elsewhere_is_refused(tmp_path: Path) -> None:
    table = {"train_batch_size": 8, "zero_optimization": {"stage": "auto"}}
    with pytest.raises(RecipeError, match="zero_optimization.stage: .auto. is filled in by transformers for some keys"):
        read(tmp_path, table)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation: there is no such key.*Did you mean zero_opt"),
        ({"f16": {"enabled": True}}, "f16: .* Did you mean fp16"),
        ({"bf16": {"enable": True}}, r"bf16.enable: .* Did you mean enabled"),
        ({"offload_optimizer": {"device": "cpu"}}, r"Did you mean zero_optimization.offload_optimizer"),
        ({"optimizer": {"type": "AdamW", "scheduler": {}}}, r"optimizer.scheduler: there is no such key"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type: a recipe has no Lion. Write AdamW"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type: a recipe has no OneCycle"),
        ({"scheduler": {"type": "WarmupLR"}}, 'warmup_type: DeepSpeed warms up by a logarithm.* Write "linear"'),
        ({"train_batch_size": 9}, "9 is not microbatch 2 × accumulation 1 × 4 data ranks = 8. Write 8"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "a plan has one precision"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 is none of its values"),
        ({"zero_optimization": {"overlap_comm": "yes"}}, "overlap_comm: 'yes' is not true or false"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, table: Mapping[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        read(tmp_path, {"train_micro_batch_size_per_gpu": 2, **table})


def test_a_sequence_that_ranks_share_is_ulysses(tmp_path: Path) -> None:
    plan = read(tmp_path, {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2}, processes=4).plan
    assert (plan.mesh.context, plan.mesh.replicate, plan.context_parallel.scheme) == (2, 2, "ulysses")


def offloading(**sections: Mapping[str, Any]) -> dict[str, Any]:
    checkpointing = sections.pop("activation_checkpointing", {})
    sharding = {"stage": 3, **sections}
    table = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": sharding}
    return {**table, "activation_checkpointing": checkpointing} if checkpointing else table


NVME = {"device": "nvme", "nvme_path": "/fast", "pin_memory": True, "buffer_count": 5}


@pytest.mark.parametrize(
    ("table", "offload", "to", "folder"),
    [
        (offloading(offload_param={"device": "none"}), "none", "host", ""),
        (offloading(offload_optimizer={"device": "cpu", "pin_memory": True}), "optimizer", "host", ""),
        (offloading(offload_param=NVME), "parameters", "disk", "/fast"),
        (offloading(offload_param=NVME, offload_optimizer=NVME), "parameters", "disk", "/fast"),
        (offloading(offload_param={"device": "nvme"}, offload_optimizer={"device": "cpu"}), "parameters", "disk", ""),
        (
            offloading(offload_optimizer=NVME, activation_checkpointing={"cpu_checkpointing": True}),
            *("optimizer+activations", "disk", "/fast"),
        ),
        (
            offloading(offload_param=NVME, activation_checkpointing={"cpu_checkpointing": True}),
            *("parameters+activations", "disk", "/fast"),
        ),
        (offloading(activation_checkpointing={"cpu_checkpointing": True}), "activations", "host", ""),
    ],
)
def test_what_waits_elsewhere(tmp_path: Path, table: dict[str, Any], offload: str, to: str, folder: str) -> None:
    migration = read(tmp_path, table)
    memory = migration.plan.memory
    assert (memory.offload, memory.offload_to, memory.offload_folder) == (offload, to, folder)
    check_round_trip(migration)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (offloading(offload_param={"device": "cpu"}), r"offload_param.device .*: weights do not wait .* Write nvme"),
        (offloading(stage=2, offload_param=NVME), r"offload_param.device .*: .* Write stage 3, or none"),  # type: ignore[arg-type]
        (
            offloading(offload_param=NVME, offload_optimizer=NVME | {"nvme_path": "/other"}),
            r"offload_optimizer.nvme_path: plan.memory.offload_folder would be '/other', .*Leave one of the two",
        ),
        (
            offloading(offload_param=NVME) | {"compile": {"deepcompile": True}},
            "cannot join compute.compile",
        ),
    ],
)
def test_what_cannot_wait_elsewhere_is_refused_by_name(tmp_path: Path, table: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        read(tmp_path, table)


def test_accelerate_says_where_weights_wait(tmp_path: Path) -> None:
    section = {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/fast"}
    table = {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": section}
    plan = read(tmp_path, table, processes=None, train_micro_batch_size_per_gpu=2).plan
    assert (plan.memory.offload, plan.memory.offload_folder) == ("parameters", "/fast")
    table["fsdp_config"], table["distributed_type"] = {"fsdp_offload_params": True}, "FSDP"
    del table["deepspeed_config"]
    with pytest.raises(RecipeError, match="fsdp_offload_params: weights do not wait in the memory of the host"):
        read(tmp_path, table, processes=None, batch_size=2)


def test_all_refusals_come_at_once(tmp_path: Path) -> None:
    table = {
        "train_batch_size": 8,
        "wandb": {"enabled": True},
        "autotuning": {"enabled": True},
        "amp": {"enabled": True},
    }
    with pytest.raises(RecipeError) as refusal:
        read(tmp_path, table)
    assert [line.split(":")[0].strip() for line in str(refusal.value).splitlines()[1:]] == [
        "wandb",
        "autotuning",
        "amp",
    ]


def test_forms_that_deepspeed_reads_from_before(tmp_path: Path) -> None:
    table = {"train_batch_size": 8, "bfloat16": {"enabled": True}, "zero_optimization": True}
    migration = read(tmp_path, table)
    assert (migration.plan.compute.precision, migration.plan.data_parallel.zero) == ("bf16", 1)


def test_processes_follow_from_three_batch_keys(tmp_path: Path) -> None:
    table = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert read(tmp_path, table, processes=None).plan.mesh.replicate == 4
    with pytest.raises(RecipeError, match="Give --processes N"):
        read(tmp_path, {"train_batch_size": 24}, processes=None)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text('{"train_batch_size": 8, "train_batch_size": 16}')
    with pytest.raises(RecipeError, match="the key train_batch_size stands there twice"):
        read_config(path, processes=2)


YAML = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_offload_params: false
  fsdp_activation_checkpointing: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
"""


def test_accelerates_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "accelerate.yaml"
    path.write_text(YAML)
    plan = read_config(path, fill={"batch_size": 4}).plan
    assert (plan.mesh.replicate, plan.mesh.shard, plan.data_parallel.zero) == (2, 4, 3)
    assert (plan.compute.precision, plan.memory.recompute) == ("bf16", "full")
    path.write_text(YAML + "num_processes: 4\n")
    with pytest.raises(RecipeError, match=r"accelerate.yaml:19: the key num_processes stands there twice"):
        read_config(path)
    path.write_text(YAML + "mixed_precison: fp16\n")
    with pytest.raises(RecipeError, match="mixed_precison: there is no such key.*Did you mean mixed_precision"):
        read_config(path, fill={"batch_size": 4})


def test_accelerate_reads_the_deepspeed_file_that_it_names(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "ds.json").write_text(json.dumps(TRAINER))
    path = tmp_path / "accelerate.yaml"
    base = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    path.write_text(base)
    assert read_config(path).plan.mesh.shard == 4
    path.write_text(f"{base}  zero_stage: 2\n")
    with pytest.raises(RecipeError, match="deepspeed_config.zero_stage: has no effect beside deepspeed_config_file"):
        read_config(path)


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(TRAINER))
    with pytest.raises(SystemExit) as end:
        main(
            [
                "migrate",
                str(path),
                "--processes",
                "2",
                "--fill",
                "learning_rate=1e-4",
                "--write",
                str(tmp_path / "new"),
            ]
        )
    assert end.value.code == 0, capsys.readouterr().err
    assert parse_plan((tmp_path / "new" / "plan.toml").read_text()).mesh.shard == 2
    assert "learning_rate = 0.0001" in (tmp_path / "new" / "recipe.part.toml").read_text()
