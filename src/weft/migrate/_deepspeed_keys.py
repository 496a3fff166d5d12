"""DeepSpeed's JSON, key by key, as of 0.19.8 (deepspeed/runtime/config.py, constants.py and zero/config.py there)."""

from __future__ import annotations

from collections.abc import Mapping

from weft.migrate._keys import Key, by_itself, combined, obeyed, refused

FLAG, WHOLE, NUMBER, TEXT = (bool,), (int,), (int, float), (str,)

_ALWAYS = "Weft does it always"
_BUFFERS = "sizes of buffers and streams are Weft's own; no number depends on them"
_SCALE = "Weft scales losses of fp16 by itself, in powers of two"
_OWN_LOOP = "write it in a loop of your own (weft.session), with what it changes in state.attach(…)"
_TRACK = "it is told of numbers by a function: write weft.session(track=…), and leave the section out"
_BATCH = "of the global batch"
_PARAMS = "of the optimizer"


def _fixed(says: str, value: object) -> Key:
    return refused(f"{says} Leave it out, or write {str(value).lower()}.", value)


_BATCHES: Mapping[str, Key] = {
    "train_batch_size": combined(
        _BATCH,
        takes=WHOLE,
        least=1,
        filled="",
        wants="per_device_train_batch_size and others",
        instead="it follows from the other two",
    ),
    "train_micro_batch_size_per_gpu": combined(
        _BATCH, takes=WHOLE, least=1, filled=8, wants="per_device_train_batch_size"
    ),
    "gradient_accumulation_steps": combined(
        _BATCH, takes=WHOLE, least=1, filled=1, wants="gradient_accumulation_steps"
    ),
    "managed_gradient_accumulation": _fixed("Weft counts microbatches by itself.", True),
    "dataloader_drop_last": refused(
        "the last batch of an epoch runs on into the next one, so that none is short. Leave it out, or write"
        " DataLoader(drop_last=True) in a loop of your own.",
        False,
    ),
}

_OPTIMIZER: Mapping[str, Key] = {
    "optimizer.type": combined(_PARAMS, takes=TEXT),
    "optimizer.legacy_fusion": by_itself(_BUFFERS),
    "optimizer.params.lr": combined(_PARAMS, takes=NUMBER, filled=5e-5, wants="learning_rate"),
    "optimizer.params.betas": combined(_PARAMS, takes=(list,), filled=[0.9, 0.999], wants="adam_beta1 and adam_beta2"),
    "optimizer.params.eps": combined(_PARAMS, takes=NUMBER, filled=1e-8, wants="adam_epsilon"),
    "optimizer.params.weight_decay": combined(_PARAMS, takes=NUMBER, filled=0.0, wants="weight_decay"),
    "optimizer.params.momentum": combined(_PARAMS, takes=NUMBER),
    "optimizer.params.nesterov": combined(_PARAMS, takes=FLAG),
    "optimizer.params.freeze_step": combined(_PARAMS, takes=WHOLE),
    "optimizer.params.adam_w_mode": combined(_PARAMS, takes=FLAG),
    "optimizer.params.torch_adam": by_itself("the rule is the same whoever computes it"),
    "optimizer.params.fused": by_itself("the rule is the same whoever computes it"),
    "optimizer.params.foreach": by_itself("the rule is the same whoever computes it"),
    "optimizer.params.bias_correction": _fixed("Weft's AdamW always corrects its moments.", True),
    "optimizer.params.amsgrad": _fixed("Weft has no AMSGrad.", False),
    "optimizer.params.dampening": _fixed("Weft's SGD has no dampening.", 0.0),
    "optimizer.params.set_grad_none": by_itself(_BUFFERS),
    "optimizer.params.cuda_aware": by_itself(_BUFFERS),
    "optimizer.params.comm_backend_name": by_itself("what carries tensors is compute.backend in the plan"),
    "optimizer.params.max_coeff": refused("Weft's LAMB does not bound its trust ratio. Leave it out."),
    "optimizer.params.min_coeff": refused("Weft's LAMB does not bound its trust ratio. Leave it out."),
    "zero_allow_untested_optimizer": by_itself("every optimizer of a recipe runs under every plan"),
    "zero_force_ds_cpu_optimizer": by_itself("an offloaded optimizer steps on the device, group by group"),
}

_SCHEDULER: Mapping[str, Key] = {
    "scheduler.type": combined("of the schedule", takes=TEXT),
    "scheduler.params.warmup_min_lr": combined("of the schedule", takes=NUMBER, filled=0),
    "scheduler.params.warmup_max_lr": combined("of the schedule", takes=NUMBER, filled=5e-5, wants="learning_rate"),
    "scheduler.params.warmup_num_steps": combined("of the schedule", takes=WHOLE, filled=0, wants="warmup_steps"),
    "scheduler.params.warmup_type": combined("of the schedule", choices=("log", "linear")),
    "scheduler.params.total_num_steps": combined(
        "of the schedule", takes=WHOLE, filled="", wants="max_steps", instead="the recipe's run.steps stands for it"
    ),
    "scheduler.params.warmup_min_ratio": combined("of the schedule", takes=NUMBER),
    "scheduler.params.cos_min_ratio": combined("of the schedule", takes=NUMBER),
    "scheduler.params.last_batch_iteration": _fixed("a resumed run of Weft knows its step.", -1),
}

_CLIPPING: Mapping[str, Key] = {
    "gradient_clipping": combined("of the optimizer", takes=NUMBER, filled=1.0, wants="max_grad_norm"),
}

_PRECISION: Mapping[str, Key] = {
    "fp16.enabled": combined("of the precision", takes=FLAG, filled=False, wants="fp16"),
    "fp16.auto_cast": by_itself("inputs follow the model's dtype"),
    "fp16.loss_scale": by_itself(_SCALE, takes=NUMBER),
    "fp16.initial_scale_power": by_itself(_SCALE, takes=WHOLE),
    "fp16.loss_scale_window": by_itself(_SCALE, takes=WHOLE),
    "fp16.hysteresis": by_itself(_SCALE, takes=WHOLE),
    "fp16.consecutive_hysteresis": by_itself(_SCALE, takes=FLAG),
    "fp16.min_loss_scale": by_itself(_SCALE, takes=NUMBER),
    "fp16.fp16_master_weights_and_grads": _fixed("masters are fp32 under fp16.", False),
    "bf16.enabled": combined("of the precision", takes=FLAG, filled=False, wants="bf16"),
    "bf16.immediate_grad_update": by_itself("gradients join what is accumulated as soon as they are there"),
    "bf16.check_grad_overflow": by_itself("a step that is not finite is skipped, and counted"),
    "bf16.bf16_master_weights_and_grads": _fixed("masters are fp32 under bf16.", False),
    "bf16.bf16_optimizer_states": _fixed("states of optimizers are fp32.", False),
    "torch_autocast.enabled": combined("of the precision", takes=FLAG),
    "torch_autocast.dtype": combined("of the precision", choices=("bfloat16", "float16", "bf16", "fp16")),
    "torch_autocast.lower_precision_safe_modules": refused(
        'a plan computes all in one precision over fp32 masters. Leave the list out, or the section, and write "bf16".'
    ),
    "amp": refused('Apex is not used. Write "bf16": {"enabled": true} in its place.', False),
    "data_types.grad_accum_dtype": combined("of gradients", choices=("fp32", "bf16", "fp16"), takes=TEXT),
    "data_types.param_dtype": refused("weights are in the plan's compute.precision. Leave it out."),
    "data_types.buffer_dtype": refused("buffers keep the dtype that the model gives them. Leave it out."),
    "data_types.keep_in_fp32_modules": refused(
        "a plan computes all in one precision over fp32 masters. Leave it out.", "auto", choices=("auto",)
    ),
}

_ZERO: Mapping[str, Key] = {
    "zero_optimization.stage": obeyed("plan.data_parallel.zero", takes=WHOLE, choices=(0, 1, 2, 3)),
    "zero_optimization.overlap_comm": by_itself(_ALWAYS, takes=FLAG),
    "zero_optimization.contiguous_gradients": by_itself(_ALWAYS, takes=FLAG),
    "zero_optimization.reduce_scatter": by_itself("each rank gets its share of the sums, whatever sends them"),
    "zero_optimization.reduce_bucket_size": combined("of buckets", takes=WHOLE, filled=""),
    "zero_optimization.use_multi_rank_bucket_allreduce": by_itself(_BUFFERS),
    "zero_optimization.allgather_partitions": by_itself(_BUFFERS),
    "zero_optimization.allgather_bucket_size": by_itself(_BUFFERS),
    "zero_optimization.compute_grad_norm": by_itself("the norm travels with the loss, in one reduction of a step"),
    "zero_optimization.load_from_fp32_weights": by_itself("checkpoints hold the masters"),
    "zero_optimization.elastic_checkpoint": by_itself("any plan loads any checkpoint"),
    "zero_optimization.round_robin_gradients": by_itself(_BUFFERS),
    "zero_optimization.parameter_alignment": by_itself(_BUFFERS),
    "zero_optimization.ignore_unused_parameters": by_itself("parameters without a gradient are skipped"),
    "zero_optimization.legacy_stage1": by_itself(_BUFFERS),
    "zero_optimization.memory_efficient_linear": by_itself(_BUFFERS),
    "zero_optimization.pipeline_loading_checkpoint": by_itself(_BUFFERS),
    "zero_optimization.override_module_apply": by_itself("initial weights are drawn by name, whole or in parts"),
    "zero_optimization.log_trace_cache_warnings": by_itself(_BUFFERS),
    "zero_optimization.enable_sanity_checks": by_itself("ranks compare what they do in every step"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": by_itself(_BUFFERS),
    "zero_optimization.sub_group_size": by_itself(_BUFFERS),
    "zero_optimization.leaf_module": by_itself("blocks are gathered one by one; what stands in one comes together"),
    "zero_optimization.zero_hpz_partition_size": refused(
        "a second copy of the shards within each node is not kept. Leave it out, or write mics_shard_size: ranks of a"
        " node share the weights, and nodes hold copies (mesh.shard and mesh.replicate).",
        0,
        1,
    ),
    "zero_optimization.mics_shard_size": combined("of the mesh", takes=WHOLE),
    "zero_optimization.mics_hierarchical_params_gather": by_itself(_BUFFERS),
    "zero_optimization.zero_quantized_weights": _fixed("weights travel as they are.", False),
    "zero_optimization.zero_quantized_nontrainable_weights": refused(
        'frozen weights are held in fewer bits by the recipe: write model.adapter.base = "int8" there. Here write'
        " false.",
        False,
    ),
    "zero_optimization.zero_quantized_gradients": obeyed(
        "plan.data_parallel.compression",
        "in 8 bits, where qgZ sends 4",
        takes=FLAG,
        becomes={True: "int8", False: "none"},
    ),
    "zero_optimization.zeropp_loco_param": refused("LoCo's error feedback is not there. Leave it out."),
    "zero_optimization.zenflow": refused("ZenFlow's late updates change what is trained. Leave it out."),
    "zero_optimization.cpu_offload": refused(
        'DeepSpeed has renamed it. Write "offload_optimizer": {"device": "cpu"}.', False
    ),
    "zero_optimization.cpu_offload_params": refused(
        "weights stay on the device. Leave it out; with stage 3 each rank holds its share only.", False
    ),
    "zero_optimization.cpu_offload_use_pin_memory": by_itself(_BUFFERS),
    "zero_optimization.offload_param.device": refused(
        'weights stay on the device. Write "none": with stage 3 each rank holds its share only, and the optimizer can'
        " wait elsewhere (offload_optimizer).",
        "none",
    ),
    "zero_optimization.offload_optimizer.device": combined("of the memory", choices=("none", "cpu", "nvme")),
    "zero_optimization.offload_optimizer.nvme_path": combined("of the memory", takes=TEXT),
    "zero_optimization.offload_optimizer.ratio": _fixed("all of the optimizer waits elsewhere, or none.", 1.0),
    "zero_optimization.offload_optimizer.super_offload": _fixed("what waits elsewhere comes back to step.", False),
}
_OFFLOADING = ("pin_memory", "buffer_count", "pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc")
_OFFLOADED = ("nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu")
_STAGE_3 = {
    "prefetch_bucket_size": True,
    "param_persistence_threshold": True,
    "model_persistence_threshold": False,
    "max_live_parameters": False,
    "max_reuse_distance": False,
    "gather_16bit_weights_on_model_save": False,
    "gather_fp16_weights_on_model_save": False,
    "module_granularity_threshold": False,
    "use_all_reduce_for_fetch_params": False,
    "allgather_sequential": False,
}
"""Keys of stage 3, which begin with `stage3_`, or not; and whether transformers fills them from the hidden size."""


def _more_of_zero() -> Mapping[str, Key]:
    zero = "zero_optimization"
    export = "weft export writes whole weights of any checkpoint"
    keys = {f"{zero}.offload_optimizer.{name}": by_itself(_BUFFERS) for name in _OFFLOADING}
    keys |= {f"{zero}.offload_param.{name}": by_itself(_BUFFERS) for name in _OFFLOADED}
    for name, is_filled in _STAGE_3.items():
        key = by_itself(export if name.startswith("gather_") else _BUFFERS, filled="" if is_filled else None)
        keys |= {f"{zero}.stage3_{name}": key, f"{zero}.{name}": key}
    return keys


_WIRE: Mapping[str, Key] = {
    "communication_data_type": combined("of gradients", choices=("fp32", "bf16", "fp16", "bfp16")),
    "seq_parallel_communication_data_type": by_itself("activations travel in the plan's precision"),
    "prescale_gradients": by_itself("sums are divided once, by the count of all samples"),
    "gradient_predivide_factor": by_itself("sums are divided once, by the count of all samples"),
    "gradient_allreduce_op": refused(
        'a loss is a mean over all samples of a step, and so are its gradients. Write "mean", and scale the loss where'
        " you want the sum.",
        "mean",
    ),
    "sparse_gradients": refused(
        "which embeddings have sparse gradients is the model's: nn.Embedding(sparse=True), and the recipe's"
        " optimizer.sparse_rule. Leave it out.",
        False,
    ),
    "disable_allgather": _fixed("updated weights go to every rank.", False),
    "ddp_bf16": by_itself("what gradients are summed in is data_parallel.reduce_precision"),
}

_AXES: Mapping[str, Key] = {
    "tensor_parallel.autotp_size": combined("of the mesh", takes=WHOLE),
    "tensor_parallel.tp_size": combined("of the mesh", takes=WHOLE),
    "tensor_parallel.tp_overlap_comm": by_itself(_ALWAYS),
    "tensor_parallel.vocab_parallel_lm_head": by_itself("the head is split with the vocabulary's loss"),
    "tensor_parallel.vocab_parallel_ce_backend": by_itself("the head is split with the vocabulary's loss"),
    "tensor_parallel.partition_config": refused(
        "how layers split is written in the recipe: [model.split], a glob over module names → column, row or another"
        " kind. Leave it out; weft describe shows what is found without."
    ),
    "tensor_parallel.preset_model": by_itself("how layers split is found in the model"),
    "tensor_parallel.tp_grain_size": _fixed("layers are cut evenly.", 1),
    "tensor_parallel.tp": refused('it is for inference. Write "autotp_size".'),
    "sequence_parallel_size": obeyed("plan.mesh.context", "Ulysses", takes=WHOLE, least=1),
    "use_data_before_expert_parallelism": by_itself("the order of axes is mesh.order"),
    "expert_parallel": refused("the engine has not got expert parallelism yet. Leave it out."),
    "pipeline.stages": refused(
        "stages are found in the model: write mesh.pipeline in the plan, and leave the section out.",
        "auto",
        1,
        choices=("auto", 1),
    ),
    "pipeline.partition": by_itself("stages are cut by cost, or where pipeline_parallel.cuts says"),
    "pipeline.seed_layers": _fixed("initial weights and dropout are keyed by name.", False),
    "pipeline.activation_checkpoint_interval": refused('write memory.recompute = "full" in the plan.', 0),
    "pipeline.pipe_partitioned": by_itself(_BUFFERS),
    "pipeline.grad_partitioned": by_itself(_BUFFERS),
}

_RECOMPUTE = 'what is computed again is the plan\'s memory.recompute ("selective", "full", or a list by block)'
_MEMORY: Mapping[str, Key] = {
    "activation_checkpointing.partition_activations": obeyed(
        "plan.memory.recompute",
        "what recomputation keeps is split already under tensor_parallel.sequence",
        takes=FLAG,
        becomes={True: "full", False: "none"},
    ),
    "activation_checkpointing.cpu_checkpointing": obeyed(
        "plan.memory.offload", takes=FLAG, becomes={True: "activations", False: "none"}
    ),
    "activation_checkpointing.number_checkpoints": by_itself(_RECOMPUTE),
    "activation_checkpointing.contiguous_memory_optimization": by_itself(_BUFFERS),
    "activation_checkpointing.synchronize_checkpoint_boundary": by_itself(_BUFFERS),
    "activation_checkpointing.profile": by_itself("a run records memory and phases in metrics.jsonl"),
    "aio": by_itself("how a disk is read is Weft's own choice"),
    "compile.deepcompile": obeyed("plan.compute.compile", "block by block, by torch.compile", takes=FLAG),
    "compile.enabled": obeyed("plan.compute.compile", "block by block, by torch.compile", takes=FLAG),
    "compile.backend": refused("blocks are compiled by torch.compile's inductor. Write inductor.", "inductor"),
    "compile.offload_activation": _fixed("a compiled block keeps its activations.", False),
    "compile.offload_opt_states": _fixed('write "offload_optimizer" in zero_optimization.', False),
    "compile.offload_parameters": _fixed("weights stay on the device.", False),
}
_COMPILING = (
    "autoep_non_moe", "free_activation", "free_activation_threshold", "offload_activation_pin_memory",
    "double_buffer", "debug_log", "symmetric_memory", "sync_before_reduce", "sync_after_reduce",
    "sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors", "passes",
    "kwargs",
)  # fmt: skip

_WATCHING: Mapping[str, Key] = {
    "steps_per_print": combined(
        "of the run", takes=WHOLE, filled="", wants="logging_steps", instead="run.log_every stands for it"
    ),
    "wall_clock_breakdown": by_itself("a run records its phases in metrics.jsonl"),
    "memory_breakdown": by_itself("a run records its memory in metrics.jsonl"),
    "dump_state": by_itself("the run's folder has its plan and recipe"),
    "log_level": by_itself("weft's loggers are Python's own"),
    "flops_profiler": by_itself("a run records its rates; weft plan prices every part of a step"),
    "comms_logger": by_itself("a run records its collectives; weft comm explain shows what they cost"),
    "timers": by_itself("a run records its phases in metrics.jsonl"),
    "tensorboard": refused(f"{_TRACK}: track=SummaryWriter(…).add_scalar."),
    "wandb": refused(f"{_TRACK}: track=lambda name, value, step: wandb.log({{name: value}}, step=step)."),
    "comet": refused(f"{_TRACK}: track=experiment.log_metric."),
    "csv_monitor": by_itself("a run writes metrics.jsonl, a line per step"),
    "monitor_config": refused(f"{_TRACK}."),
    "disable_python_gc": by_itself("Python collects where nothing waits for it"),
}

_KEEPING: Mapping[str, Key] = {
    "checkpoint.load_universal": by_itself("any plan loads any checkpoint"),
    "checkpoint.tag_validation": by_itself("ranks agree on every save"),
    "checkpoint.use_node_local_storage": refused(
        "all ranks write into one folder, which all must see. Leave it out.", False
    ),
    "checkpoint.parallel_write": by_itself("every rank writes its share"),
    "checkpoint.writer": by_itself("every rank writes its share"),
    "datastates_ckpt": by_itself("every rank writes its share"),
    "nebula": refused("it is a service of one cloud. Leave it out; saves are whole or absent on any file system."),
}

_RUNNING: Mapping[str, Key] = {
    "elasticity": refused(
        "the global batch is the recipe's on any number of ranks, and any plan loads any checkpoint: resume with"
        " another plan. Leave it out."
    ),
    "autotuning": refused("weft plan searches the plan, weft train with --plan auto tries the best. Leave it out."),
    "curriculum_learning": refused(f"lengths do not grow by themselves: {_OWN_LOOP}. Leave it out."),
    "data_efficiency": refused(f"samples are not chosen by metrics: {_OWN_LOOP}. Leave it out."),
    "progressive_layer_drop": refused("it changes the model: write it in the model. Leave it out."),
    "eigenvalue": refused("it belongs to compression_training. Leave it out."),
    "quantize_training": refused("it changes the model: write it in the model. Leave it out."),
    "compression_training": refused("it changes the model: write it in the model. Leave it out."),
    "weight_quantization": refused('frozen weights: write model.adapter.base = "int8" in the recipe. Leave it out.'),
    "sparse_attention": refused("attention is the model's: write it there. Leave it out."),
    "hybrid_engine": refused("weft generate takes a checkpoint of any plan. Leave it out."),
    "vocabulary_size": by_itself("it is read off the model"),
    "train_iters": refused("write it as run.steps in the recipe, and leave it out here."),
}

KEYS: Mapping[str, Key] = {
    **_BATCHES,
    **_OPTIMIZER,
    **_SCHEDULER,
    **_CLIPPING,
    **_PRECISION,
    **_ZERO,
    **_more_of_zero(),
    **_WIRE,
    **_AXES,
    **_MEMORY,
    **{f"compile.{name}": by_itself(_BUFFERS) for name in _COMPILING},
    **_WATCHING,
    **_KEEPING,
    **_RUNNING,
}
"""Dotted key → what becomes of it."""
