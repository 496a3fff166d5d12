"""Accelerate's YAML, key by key, of version 1.15.0: accelerate/commands/config/config_args.py and cluster.py there."""

from __future__ import annotations

from collections.abc import Mapping

from weft.migrate._keys import Key, by_itself, combined, obeyed, refused

FLAG, WHOLE, NUMBER, TEXT = (bool,), (int,), (int, float), (str,)

_STARTED = "how ranks are started and meet is no setting of a plan: weft launch -n N train.py, or torchrun"
_WRAPPED = "what is gathered together is a block of the model"
_TPU = "Weft runs on CPUs and CUDA devices. Leave it out."
_FP8 = "Weft computes in fp32, bf16 or fp16. Leave the section out."
_MEGATRON = "it is a setting of Megatron-LM's own. Leave it out."
_DICTS = "weft checkpoints hold whole tensors in shards, of any plan for any plan"


def _off(says: str) -> Key:
    return refused(f"{says} Write false, or leave it out.", False)


_RUN: Mapping[str, Key] = {
    "compute_environment": refused(
        "Weft knows no cloud: start ranks on your machines, by weft launch or torchrun. Write LOCAL_MACHINE.",
        "LOCAL_MACHINE",
    ),
    "distributed_type": combined("of the plan", takes=TEXT),
    "num_processes": combined("of the mesh", takes=WHOLE, least=1),
    "num_machines": combined("of the mesh", takes=WHOLE, least=1),
    "mixed_precision": combined("of the precision", takes=(str, bool)),
    "fp16": combined("of the precision", takes=FLAG),
    "use_cpu": obeyed("plan.compute.device", takes=FLAG, becomes={True: "cpu", False: "auto"}),
    "debug": by_itself("ranks compare what they do in every step"),
    "gpu_ids": refused("write CUDA_VISIBLE_DEVICES before the command that starts the ranks. Here write all.", "all"),
    "machine_rank": by_itself(_STARTED),
    "main_process_ip": by_itself(_STARTED),
    "main_process_port": by_itself(_STARTED),
    "rdzv_backend": by_itself(_STARTED),
    "same_network": by_itself(_STARTED),
    "main_training_function": by_itself("a notebook calls weft.train; a loop of one's own is a script"),
    "enable_cpu_affinity": by_itself("threads are compute.threads_per_rank"),
    "num_cpu_threads_per_process": obeyed("plan.compute.threads_per_rank", takes=WHOLE, least=1),
    "mpirun_config": by_itself(_STARTED),
    "downcast_bf16": refused(_TPU, False, "no"),
    "tpu_name": refused(_TPU),
    "tpu_zone": refused(_TPU),
    "tpu_use_cluster": refused(_TPU, False),
    "tpu_use_sudo": refused(_TPU, False),
    "tpu_vm": refused(_TPU),
    "tpu_env": refused(_TPU),
    "command_file": refused(_TPU),
    "commands": refused(_TPU),
    "fp8_config": refused(_FP8),
    "dynamo_backend": combined("of compilation", takes=TEXT),
}

_SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "1", "2", "3", "4", "5")
_FSDP: Mapping[str, Key] = {
    "fsdp_version": combined("of ZeRO", choices=(1, 2, "1", "2")),
    "fsdp_sharding_strategy": combined("of ZeRO", takes=(str, int)),
    "fsdp_reshard_after_forward": combined("of ZeRO", takes=(bool, str)),
    "fsdp_offload_params": _off(
        "weights stay on the device; the optimizer can wait on the host: memory.offload in the plan."
    ),
    "fsdp_activation_checkpointing": obeyed("plan.memory.recompute", takes=FLAG, becomes={True: "full", False: "none"}),
    "fsdp_activation_checkpointing_offload": _off("activations are not offloaded."),
    "fsdp_auto_wrap_policy": by_itself(_WRAPPED),
    "fsdp_transformer_layer_cls_to_wrap": by_itself(_WRAPPED),
    "fsdp_min_num_params": by_itself(_WRAPPED),
    "fsdp_backward_prefetch": by_itself("the next block is gathered while one computes"),
    "fsdp_backward_prefetch_policy": by_itself("the next block is gathered while one computes"),
    "fsdp_forward_prefetch": by_itself("the next block is gathered while one computes"),
    "fsdp_state_dict_type": by_itself(_DICTS),
    "fsdp_use_orig_params": by_itself("parameters keep their names"),
    "fsdp_cpu_ram_efficient_loading": by_itself("ranks read their share of weights from the folder"),
    "fsdp_sync_module_states": by_itself("rank 0's weights go to all ranks"),
    "fsdp_ignored_modules": refused("all parameters are shared out. Leave it out."),
}

_DEEPSPEED: Mapping[str, Key] = {
    "deepspeed_config_file": combined("read as DeepSpeed's JSON", takes=TEXT),
    "zero_stage": combined("of ZeRO", choices=(0, 1, 2, 3)),
    "gradient_accumulation_steps": combined("of the batch", takes=(int, str)),
    "gradient_clipping": combined("of the optimizer", takes=(int, float, str)),
    "offload_optimizer_device": combined("of the memory", choices=("none", "cpu", "nvme")),
    "offload_optimizer_nvme_path": combined("of the memory", takes=TEXT),
    "offload_param_device": refused(
        "weights stay on the device. Write none: with zero_stage 3 each rank holds its share only.", "none"
    ),
    "offload_param_nvme_path": by_itself(""),
    "zero3_init_flag": by_itself("weights are drawn or read share by share under every plan"),
    "zero3_save_16bit_model": by_itself("weft export writes whole weights of any checkpoint, in any dtype"),
    "deepspeed_hostfile": by_itself(_STARTED),
    "deepspeed_exclusion_filter": by_itself(_STARTED),
    "deepspeed_inclusion_filter": by_itself(_STARTED),
    "deepspeed_multinode_launcher": by_itself(_STARTED),
    "deepspeed_moe_layer_cls_names": by_itself(_WRAPPED),
}

_AXES: Mapping[str, Key] = {
    "dp_replicate_size": obeyed("plan.mesh.replicate", takes=WHOLE, least=1),
    "dp_shard_size": obeyed("plan.mesh.shard", takes=WHOLE, least=1),
    "tp_size": obeyed("plan.mesh.tensor", takes=WHOLE, least=1),
    "cp_size": obeyed("plan.mesh.context", takes=WHOLE, least=1),
    "cp_backend": by_itself("of the context axis"),
    "cp_comm_strategy": obeyed(
        "plan.context_parallel.scheme",
        choices=("allgather", "alltoall"),
        becomes={"allgather": "all_gather", "alltoall": "ring"},
    ),
    "sp_size": refused("the engine has not got context parallelism yet. Write 1.", 1),
    "sp_backend": by_itself("of the context axis"),
    "sp_seq_length": by_itself("of the context axis"),
    "sp_seq_length_is_variable": by_itself("of the context axis"),
    "sp_attn_implementation": by_itself("of the context axis"),
}

_MEGATRON_LM: Mapping[str, Key] = {
    "tp_degree": obeyed("plan.mesh.tensor", takes=WHOLE, least=1),
    "pp_degree": obeyed("plan.mesh.pipeline", takes=WHOLE, least=1),
    "num_micro_batches": combined("of the batch", takes=WHOLE, least=1),
    "sequence_parallelism": obeyed("plan.tensor_parallel.sequence", takes=FLAG),
    "recompute_activations": obeyed("plan.memory.recompute", takes=FLAG, becomes={True: "selective", False: "none"}),
    "use_distributed_optimizer": obeyed("plan.data_parallel.zero", takes=FLAG, becomes={True: 1, False: 0}),
    "gradient_clipping": combined("of the optimizer", takes=NUMBER),
    "context_parallel_size": obeyed("plan.mesh.context", takes=WHOLE, least=1),
    "expert_model_parallel_size": obeyed("plan.mesh.expert", takes=WHOLE, least=1),
}
_MEGATRON_OTHER = (
    "use_custom_fsdp", "no_load_optim", "eod_mask_loss", "overlap_cpu_optimizer_d2h_h2d", "no_save_optim",
    "optimizer_cpu_offload", "use_precision_aware_optimizer", "decoder_last_pipeline_num_layers",
    "recompute_granularity", "recompute_method", "recompute_num_layers", "attention_backend", "attention_dropout",
    "hidden_dropout", "attention_softmax_in_fp32", "expert_tensor_parallel_size", "calculate_per_token_loss",
    "use_rotary_position_embeddings", "num_layers_per_virtual_stage",
)  # fmt: skip

_DYNAMO: Mapping[str, Key] = {
    "backend": combined("of compilation", takes=TEXT),
    "mode": refused("blocks are compiled in torch.compile's default mode. Write default.", "default"),
    "use_dynamic": _off("shapes are what torch.compile finds."),
    "use_fullgraph": by_itself("each block is compiled by itself"),
    "use_regional_compilation": by_itself("each block is compiled by itself"),
}


def _with_prefixes(section: str, keys: Mapping[str, Key], *prefixes: str) -> dict[str, Key]:
    return {f"{section}.{prefix}{name}": key for prefix in prefixes for name, key in keys.items()}


KEYS: Mapping[str, Key] = {
    **_RUN,
    **_with_prefixes("fsdp_config", _FSDP, ""),
    **_with_prefixes("deepspeed_config", _DEEPSPEED, ""),
    **_with_prefixes("parallelism_config", _AXES, "parallelism_config_"),
    **_with_prefixes("megatron_lm_config", _MEGATRON_LM, "megatron_lm_"),
    **_with_prefixes(
        "megatron_lm_config", {name: refused(_MEGATRON, False) for name in _MEGATRON_OTHER}, "megatron_lm_"
    ),
    **_with_prefixes("dynamo_config", _DYNAMO, "dynamo_"),
}
"""Dotted key → what becomes of it."""
