"""Whole weights of a checkpoint or a session: a folder that `transformers` loads, or adapters as `peft` saves them."""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from weft.api.guards.model_guard import MovedParameter
from weft.config.plan import Plan
from weft.config.recipe import Recipe, load_recipe
from weft.config.recipe.hf_folder import read_hf_processors
from weft.errors import CheckpointError, LaunchError
from weft.events import RunFolder
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.run.checkpoint import Checkpointer, Peers
from weft.run.checkpoint.export import StoredWeights, export_checkpoint, new_export, open_checkpoint
from weft.run.data.preparation import path_of
from weft.techniques.build import ParallelModel
from weft.techniques.core import CheckpointShard, NestedSplit

Dtype = Literal["fp32", "bf16", "fp16"]
_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    checkpoint: str | Path, folder: str | Path, *, dtype: Dtype | None = None, average: bool | None = None
) -> Path:
    """Write a checkpoint's whole weights into a new folder, whatever plan saved it, and return the folder.

    That of a recipe's run has the names and the `config.json` that `transformers` loads, and the tokenizer; of adapters
    it is what `peft` loads.  That of a session has the names of the user's module: `state.export` writes its config,
    too.  Not collective: call it on one process, outside of any job.

    Args:
        checkpoint: folder of a run, then its newest checkpoint; or a checkpoint in it, as `…/checkpoints/step-000120`.
        folder: must not exist, or be empty; it appears complete or not at all.
        dtype: of floating-point weights; by default that in which they are saved.
        average: the moving average of the weights; by default where the run keeps one.

    Raises:
        LaunchError: the dtype is none.
        CheckpointError: there is no checkpoint, it is damaged, it keeps no average, or the folder is not empty.
        RecipeError: the run's recipe cannot be read, or its model not be built.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise LaunchError(f"dtype = {dtype} is none of {', '.join(_DTYPES)}.")
    path = path_of("the checkpoint", checkpoint, CheckpointError).absolute()
    run = next((RunFolder(above) for above in (path, *path.parents[:2]) if (above / "recipe.toml").is_file()), None)
    recipe = load_recipe(run.recipe) if run is not None else None
    tokenizer = run.path / "tokenizer.json" if run is not None else None
    tokenizer = tokenizer if tokenizer is not None and tokenizer.is_file() else None
    return export_checkpoint(
        path,
        build_model(recipe) if recipe is not None else None,
        new_folder_of(folder),
        use_average=average,
        tokenizer=tokenizer,
        processors=[] if recipe is None else processor_files(recipe, tokenizer),
        dtype=_DTYPES[dtype] if dtype is not None else None,
    )


def export_model(
    shards: Sequence[CheckpointShard], model: ParallelModel, steps: int, given: object, peers: Peers, plan: Plan
) -> Path:
    """Write a model that ranks hold in pieces as `transformers` loads it, or its adapters as `peft` does.  Call on
    every rank; all must see the folder.

    Raises:
        CheckpointError: on every rank; the folder is not empty or cannot be written.
    """
    folder = new_folder_of(given)
    problem = peers.first_problem(_complex_in(model))
    if problem is not None:
        raise CheckpointError(problem)
    partial = folder.with_name(f".{folder.name}.exporting")
    stored = Checkpointer(partial, peers).save(steps, shards)
    if peers.rank == 0:
        try:
            _export_saved(stored, model.blueprint, folder, plan)
        except CheckpointError as error:
            problem = str(error)
        shutil.rmtree(partial, ignore_errors=True)
    problem = peers.first_problem(problem)
    if problem is not None:
        raise CheckpointError(problem)
    return folder


def _export_saved(stored: Path, blueprint: Blueprint, folder: Path, plan: Plan) -> None:
    """Write what all ranks have saved; on one process."""
    if has_adapters(blueprint.module):
        export_adapters(stored, blueprint.module, folder, is_whole=plan.mesh.pipeline == 1)
    else:
        export_checkpoint(stored, with_config_of(blueprint), folder)


def _complex_in(model: ParallelModel) -> str | None:
    """Why a model cannot be exported, of what this rank holds of it."""
    tensors = [
        named for part in model.parts for named in (*part.module.named_parameters(), *part.module.named_buffers())
    ]
    for name, tensor in tensors:
        if tensor.is_complex():
            return (
                f"{name} is complex, which no file of safetensors that transformers loads can hold. Keep the weights by"
                " state.save(), or register torch.view_as_real of it in the model."
            )
    return None


def new_folder_of(folder: object) -> Path:
    """Return where an export is written.

    Raises:
        CheckpointError: it is no path, has no name of its own, or is a file.
    """
    path = path_of("the export's folder", folder, CheckpointError)
    path = path if path.name else path.absolute()
    if not path.name:
        raise CheckpointError(f"an export needs a new folder, and {path} is the root of all. Give it a name.")
    if path.is_file():
        raise CheckpointError(f"{path} is a file, and an export needs a new folder. Give another name.")
    return path


def with_config_of(blueprint: Blueprint) -> Blueprint:
    """The blueprint of a model that has a config (of Hugging Face), with that as the one to export."""
    config = getattr(blueprint.module, "config", None)
    if blueprint.export_config is not None or not hasattr(config, "to_dict"):
        return blueprint
    return replace(blueprint, export_config=cast(Any, config).to_dict())


def processor_files(recipe: Recipe, tokenizer: Path | None) -> list[Path]:
    """Files of the model's folder that prepare its inputs; none where a run has another tokenizer."""
    if recipe.model.hf is None or recipe.data.tokenizer is not None:
        return []
    processors = read_hf_processors(recipe.model.hf)
    is_other = tokenizer is not None and not (processors.folder / "tokenizer.json").is_file()
    return [] if is_other or processors.is_empty else processors.files


logger = logging.getLogger(__name__)

_WEIGHTS = "adapter_model.safetensors"
_PLACES = ("modules_to_save", "base_model", "model")
"""Parts of names that files leave out, or put before each."""


def has_adapters(module: nn.Module) -> bool:
    """Whether `peft` has put adapters into a model: by `get_peft_model`, by `inject_adapter_in_model`, or by the
    `add_adapter` of transformers."""
    configs = getattr(module, "peft_config", None)
    return "peft" in sys.modules and isinstance(configs, Mapping) and bool(configs)


def export_adapters(checkpoint: Path, module: nn.Module, folder: Path, *, is_whole: bool = True) -> Path:
    """Write the adapters of a model into a new folder, which `PeftModel.from_pretrained` loads.  Call on one process.

    Args:
        checkpoint: the weights of the whole model, by the names of the module.
        module: the model, whatever it holds of its weights by now.
        folder: must not exist, or be empty; it appears complete or not at all.
        is_whole: whether this process has all of the model's modules; else it is a stage's.

    Raises:
        CheckpointError: peft cannot save these adapters so, or the folder is not writable or not empty.
    """
    weights = StoredWeights(open_checkpoint(checkpoint))
    _check_stage(module, is_whole)
    with new_export(folder) as partial:
        saving = _Exporter(module, weights, partial)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what a folder of the base model would say, where there is none
                saving.save()
        except OSError:
            raise
        except Exception as problem:  # whatever a method of peft's may raise
            raise CheckpointError(
                f"peft does not save these adapters ({type(problem).__name__}: {problem}). Keep them by state.save()."
            ) from problem
        saving.warn_of_what_is_left_out()
    return folder


class _Exporter(nn.Module):
    """Saves a model while it holds whole weights, for the methods that ask the model for them, not its names."""

    def __init__(self, module: nn.Module, weights: StoredWeights, folder: Path) -> None:
        super().__init__()
        self.module = module
        self._weights, self._folder = weights, folder
        self._configs: Mapping[str, Any] = getattr(module, "peft_config", {})

    def save(self) -> None:
        """Write weights and configurations."""
        asked = {
            f"module.{name}": self._weights[name]
            for name, _ in self.module.named_parameters()
            if name.startswith("prompt_encoder.")
        }
        torch.func.functional_call(self, asked, ())

    def forward(self) -> None:
        peft: Any = sys.modules["peft"]
        if isinstance(self.module, peft.PeftModel):
            cast(Any, self.module).save_pretrained(str(self._folder), state_dict=self._weights)
            return
        for name, config in self._configs.items():
            self._save_injected(peft, name, config)

    def _save_injected(self, peft: Any, name: str, config: Any) -> None:
        """Adapters in a model that is none of peft's own, under the names that peft gives to one of its own."""
        saved: dict[str, Tensor] = peft.get_peft_model_state_dict(
            self.module, state_dict=self._weights, adapter_name=name, save_embedding_layers=False
        )
        folder = self._folder / name if name != "default" else self._folder
        folder.mkdir(exist_ok=True)
        from safetensors.torch import save_file

        tensors = {f"base_model.model.{key}": tensor.clone().contiguous() for key, tensor in saved.items()}
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
        before = config.inference_mode, config.base_model_name_or_path
        config.inference_mode = True
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = getattr(self.module, "name_or_path", None) or None
        try:
            config.save_pretrained(str(folder))
        finally:
            config.inference_mode, config.base_model_name_or_path = before

    def warn_of_what_is_left_out(self) -> None:
        """Name the parameters that were trained and that no file of adapters holds."""
        if any(config.is_prompt_learning for config in self._configs.values()):
            return
        names = set[str]()
        for path in self._folder.rglob(_WEIGHTS):
            library: Callable[..., Any] = safe_open  # it has no types
            with library(path, framework="np") as file:
                names.update(self._plain(key) for key in file.keys())  # noqa: SIM118  # it is no mapping
        here = (
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if not isinstance(parameter, MovedParameter)
        )
        trained = [name for name, tensor in here if tensor.requires_grad]
        left = [name for name in trained if self._plain(name) not in names]
        if left:
            logger.warning(
                "%d trained parameters are not exported, because they are none of the adapters' (%s). Name their"
                " modules in modules_to_save of the adapters' configuration, or keep them by state.save().",
                len(left),
                ", ".join(left[:3]),
            )

    def _plain(self, name: str) -> str:
        """A name without what files leave out of it."""
        return ".".join(part for part in name.split(".") if part not in _PLACES and part not in self._configs)


def _check_stage(module: nn.Module, is_whole: bool) -> None:
    """Refuse what is saved by looking at modules, where other stages have some of them."""
    configs: Mapping[str, Any] = getattr(module, "peft_config", {})
    settings = ("modules_to_save", "trainable_token_indices")
    asked = [name for name in settings if any(getattr(config, name, None) for config in configs.values())]
    if asked and not is_whole:
        raise CheckpointError(
            f"under a pipeline no rank has all modules that {asked[0]} of the adapters names, and peft saves them by"
            " looking at them. Save with state.save(), and export it from a session without mesh.pipeline."
        )


def gather_weights(shards: Sequence[CheckpointShard], all_gather: Callable[[Any], list[Any]]) -> dict[str, Tensor]:
    """Return parameters and buffers of a model by name, on the CPU.  Call on every rank.

    Args:
        shards: what this rank holds.
        all_gather: returns what every rank has given it.
    """
    own: dict[str, list[CheckpointShard]] = defaultdict(list)
    for shard in shards:
        if shard.counts and shard.addend is None:
            own[shard.name].append(shard)
    names = sorted({name for names in all_gather(sorted(own)) for name in names})
    return {name.partition("/")[2]: _joined(own.get(name, []), all_gather) for name in names}


def _joined(shards: Sequence[CheckpointShard], all_gather: Callable[[Any], list[Any]]) -> Tensor:
    """One tensor at a time: a rank needs memory for the whole model once."""
    mine = [[list(shard.shape), shard.split.numbers, shard.start, shard.tensor.detach()] for shard in shards]
    runs = [run for of_rank in all_gather(mine) for run in of_rank]
    for shard in shards:
        if shard.let_go is not None:
            shard.let_go()
    shape, split = torch.Size(runs[0][0]), NestedSplit.of_numbers(runs[0][1])
    local = split.local_shape(shape)
    parts = [torch.empty(local.numel(), dtype=runs[0][3].dtype) for _ in range(split.parts)]
    for _, numbers, start, tensor in runs:
        parts[NestedSplit.of_numbers(numbers).index][start : start + tensor.numel()] = tensor.cpu()
    return split.join([part.view(local) for part in parts])
