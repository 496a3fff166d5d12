"""Names of the peer that this package has not, and what to do instead. Each says so when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.accelerate._installed import asking_for
from weft.errors import did_you_mean, not_had

OWNER = "weft.accelerate"
"""The package that messages name."""

METHODS: Mapping[str, str] = {
    "context_parallel_rank": "Read accelerator.process_index: ranks that share a sequence are one process here.",
    "data_parallel_shard_rank": "Read accelerator.process_index.",
    "deepspeed_ulysses_dl_adapter": "Give Accelerator(plan=…) with mesh.context and a scheme: batches stay whole.",
    "fp8_backend": "Weft does not compute in fp8.",
    "lomo_backward": "Give prepare an optimizer that updates in its step().",
    "maybe_context_parallel": "Give Accelerator(plan=…) with mesh.context: the model's forward is split by itself.",
    "pipeline_parallel_rank": "A loop with a backward of its own has no pipeline: weft.session's state.step has.",
    "tensor_parallel_rank": "Read accelerator.process_index: ranks that share matrices are one process here.",
    "torch_device_mesh": "Give Accelerator(plan=…): the mesh is the plan's own.",
}
"""Methods of the peer's Accelerator, each with what to do instead."""

_OFFLOAD = "Models are trained here: see memory.offload of a plan, or load the model by its own library."
_QUANTISED = "Weft does not train quantised weights."
_LAUNCH = "Start scripts by weft launch, or torchrun."
_MEGATRON = "Megatron-LM's engine is not had: give Accelerator(plan=…)."
_FP8 = "Weft does not compute in fp8."
_ENGINE = (
    *("DistributedOperationException", "OffloadedWeightsLoader", "PrefixedDataset", "TensorInformation"),
    *("align_module_device", "calculate_maximum_sizes", "check_device_map", "compile_regions", "compute_module_sizes"),
    *("convert_model", "convert_outputs_to_fp32", "copy_tensor_to_devices", "extract_submodules_state_dict"),
    *("find_tied_parameters", "get_balanced_memory", "get_data_structure", "get_grad_scaler", "get_max_layer_size"),
    *("get_max_memory", "get_mixed_precision_context_manager", "has_offloaded_params", "initialize_tensors"),
    *("is_peft_model", "is_port_in_use", "load_state_dict"),
    *("named_module_tensors", "offload_state_dict", "offload_weight", "pad_input_tensors", "retie_parameters"),
    *("save_offload_index", "set_module_tensor_to_device", "slice_tensors"),
    *("verify_operation", "DummyOptim", "DummyScheduler", "DeepSpeedEngineWrapper", "DeepSpeedSchedulerWrapper"),
    *("BatchSamplerShard", "IterableDatasetShard", "MpDeviceLoaderWrapper", "GatheredParameters"),
)
"""Names of the peer's own engine."""

NAMES: Mapping[str, str] = {
    **dict.fromkeys(_ENGINE, "It is a part of the peer's engine, which a session has in its own way."),
    "cpu_offload": _OFFLOAD,
    "cpu_offload_with_hook": _OFFLOAD,
    "disk_offload": _OFFLOAD,
    "dispatch_model": _OFFLOAD,
    "infer_auto_device_map": _OFFLOAD,
    "init_empty_weights": "Construct the model on the CPU.",
    "init_on_device": "Construct the model on the CPU.",
    "load_checkpoint_and_dispatch": _OFFLOAD,
    "load_checkpoint_in_model": "Load the model by its own library before prepare.",
    "prepare_pippy": "Use weft.generate, or a pipeline plan with weft.session and state.step(batch).",
    "load_and_quantize_model": _QUANTISED,
    "BnbQuantizationConfig": _QUANTISED,
    "MegatronLMPlugin": _MEGATRON,
    "MegatronLMDummyDataLoader": _MEGATRON,
    "MegatronLMDummyScheduler": _MEGATRON,
    "AORecipeKwargs": _FP8,
    "FP8RecipeKwargs": _FP8,
    "MSAMPRecipeKwargs": _FP8,
    "TERecipeKwargs": _FP8,
    "TorchContextParallelConfig": "Give Accelerator(plan=…) with mesh.context and context_parallel.scheme.",
    "DeepSpeedSequenceParallelConfig": "Give Accelerator(plan=…) with mesh.context and context_parallel.scheme.",
    "merge_fsdp_weights": "Call accelerator.save_model: it writes whole weights under every plan.",
    "PrepareForLaunch": _LAUNCH,
    "write_basic_config": _LAUNCH,
}
"""Names of the peer's modules, each with what to do instead."""


def name_of(module: str, name: str) -> Any:
    """Return the `__getattr__` of a module in the peer's layout."""
    if (asks := asking_for(name)) is not None:
        return asks
    if name in NAMES:
        return not_had(name, OWNER, NAMES[name])
    raise AttributeError(f"module {module!r} has no attribute {name!r}.{did_you_mean(name, NAMES)}", name=name)
