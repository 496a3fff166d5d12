"""What the words of Accelerate, Fabric, DeepSpeed and plain DDP are in a session."""

from __future__ import annotations

from collections.abc import Mapping

HANDLES = {
    "accelerate.Accelerator": "accelerate",
    "lightning.Fabric": "fabric",
    "lightning.fabric.Fabric": "fabric",
    "lightning_fabric.Fabric": "fabric",
}
"""Classes of which a script has one object, through which it says all."""

WRAPPERS = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.DataParallel")
SAMPLER = "torch.utils.data.DistributedSampler"
RENAMED = {
    "torch.nn.parallel.distributed.DistributedDataParallel": WRAPPERS[0],
    "torch.utils.data.distributed.DistributedSampler": SAMPLER,
}

ATTRIBUTES: Mapping[str, str] = {
    "is_main_process": "session.rank == 0",
    "is_local_main_process": "session.rank == 0",
    "is_global_zero": "session.rank == 0",
    "is_last_process": "session.rank == session.world_size - 1",
    "process_index": "session.rank",
    "global_rank": "session.rank",
    "num_processes": "session.world_size",
    "world_size": "session.world_size",
    "device": "session.device",
}
"""Attribute of a handle → what stands for it."""

CALLS: Mapping[str, str] = {
    "unwrap_model": "{0}",
    "gather_for_metrics": "{0}",
    "gather": "{0}",
    "all_gather": "{0}",
    "all_reduce": "{0}",
    "reduce": "{0}",
    "pad_across_processes": "{0}",
    "to_device": "{0}",
    "save_state": "state.save()",
    "load_state": "state.load()",
    "save": "state.save()",
    "load": "state.load()",
    "save_checkpoint": "state.save()",
    "load_checkpoint": "state.load()",
    "get_state_dict": "{0}.state_dict()",
    "seed_everything": "torch.manual_seed({0})",
    "skip_first_batches": "{0}",
    "is_global_zero": "session.rank == 0",
}
"""Method of a handle → what stands for it; `{0}` is its first argument."""

WORTH_SAYING: Mapping[str, str] = {
    "gather_for_metrics": "every rank goes through the whole of a loader that is not prepared, so that nothing is"
    " gathered; state.evaluate(loader, {name: metric}) shares it out",
    "save_state": "state.save() writes into the session's folder: weft.session(folder=…)",
    "load_state": "state.load() takes the newest save of the session's folder, or a path",
    "save": "state.save() writes model, optimizer, place in the data and what state.attach(…) was given",
    "load": "state.load() takes the newest save of the session's folder, or a path",
    "save_checkpoint": "state.save() writes into the session's folder: weft.session(folder=…)",
    "load_checkpoint": "state.load() takes the newest save of the session's folder, or a path",
    "skip_first_batches": "after state.load() the batches go on where the run was, by themselves",
}
SAME_SAYING = {"gather": "gather_for_metrics", "all_gather": "gather_for_metrics", "reduce": "gather_for_metrics"}

DROPPED: Mapping[str, str] = {
    "wait_for_everyone": "",
    "barrier": "",
    "launch": "",
    "free_memory": "",
    "end_training": "",
    "register_for_checkpointing": "state.attach(name=object) after prepare saves it with the run",
    "init_trackers": "trackers are told by weft.session(track=…), a function of name, value and step",
    "log": "losses and rates are told to weft.session(track=…) by themselves",
    "log_dict": "losses and rates are told to weft.session(track=…) by themselves",
    "setup_module": "",
}
"""Statements of which nothing is left, and what to know."""

CONTEXTS: Mapping[str, str] = {
    "main_process_first": "session.first()",
    "local_main_process_first": "session.first(per_host=True)",
    "rank_zero_first": "session.first()",
}
UNWRAPPED = (
    "accumulate",
    "no_sync",
    "autocast",
    "no_backward_sync",
    "join_uneven_inputs",
    "sharded_model",
    "init_module",
)
"""Contexts of which the inside is left."""

FUNCTIONS: Mapping[str, str | None] = {
    "torch.distributed.init_process_group": None,
    "torch.distributed.destroy_process_group": None,
    "torch.distributed.barrier": None,
    "torch.distributed.all_reduce": None,
    "torch.distributed.broadcast": None,
    "deepspeed.init_distributed": None,
    "torch.cuda.set_device": None,
    "torch.distributed.get_rank": "session.rank",
    "torch.distributed.get_world_size": "session.world_size",
    "accelerate.utils.set_seed": "torch.manual_seed({0})",
    "lightning.seed_everything": "torch.manual_seed({0})",
    "lightning.fabric.seed_everything": "torch.manual_seed({0})",
    "lightning_fabric.seed_everything": "torch.manual_seed({0})",
    "lightning.fabric.Fabric.seed_everything": "torch.manual_seed({0})",
    "lightning_fabric.Fabric.seed_everything": "torch.manual_seed({0})",
    "lightning.Fabric.seed_everything": "torch.manual_seed({0})",
}
"""Functions of modules; None: nothing is left."""

ADVICE: Mapping[str, str] = {
    "torch.distributed.all_reduce": "every rank goes through the whole of a loader that is not prepared, and a step's"
    " loss is that of the whole batch: nothing is left to sum",
    "clip_grad_value_": "gradients are clipped by their norm: prepare(…, max_grad_norm=…)",
    "set_trigger": "ranks stop together by what all of them know, such as the step's loss",
    "check_trigger": "ranks stop together by what all of them know, such as the step's loss",
    "split_between_processes": "state.predict(loader) shares samples out and gathers what comes of them",
    "save_model": "state.export(folder) writes the whole model under any plan",
    "profile": "a run records its phases in metrics.jsonl; torch.profiler works around state.step(batch) as it is",
}

PACKAGES = ("accelerate", "lightning", "lightning_fabric", "deepspeed")
