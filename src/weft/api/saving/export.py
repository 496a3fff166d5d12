"""A checkpoint as a folder that `transformers` loads."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from weft.api.saving.export_adapters import export_adapters, has_adapters
from weft.config.plan import Plan
from weft.config.recipe import Recipe, load_recipe
from weft.config.recipe.hf_folder import read_hf_processors
from weft.errors import CheckpointError, LaunchError
from weft.events import RunFolder
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.run.checkpoint import Checkpointer, Peers
from weft.run.checkpoint.export import export_checkpoint
from weft.run.data.preparation import path_of
from weft.techniques.build import ParallelModel
from weft.techniques.core import Piece

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
    pieces: Sequence[Piece], model: ParallelModel, steps: int, given: object, peers: Peers, plan: Plan
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
    stored = Checkpointer(partial, peers).save(steps, pieces)
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
    held = [named for part in model.parts for named in (*part.module.named_parameters(), *part.module.named_buffers())]
    for name, each in held:
        if each.is_complex():
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
