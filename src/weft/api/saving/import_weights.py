"""Weights that another program saved: as a folder that `transformers` loads, or as a run that a recipe goes on with."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from weft.analysis.blueprint import build_blueprint
from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.document import Json
from weft.config.plan import Plan, complete_plan
from weft.config.recipe import Recipe, dump_recipe, load_recipe
from weft.errors import CheckpointError, RecipeError, did_you_mean
from weft.events import RunFolder
from weft.model.blueprint import Blueprint
from weft.run.checkpoint import Checkpointer
from weft.run.checkpoint.export import new_export, write_weights
from weft.run.checkpoint.foreign import Converted, ForeignWeights, convert
from weft.run.data import data_shape, open_data
from weft.run.data.preparation import path_of, prepare_data, silent
from weft.run.engine import create_training
from weft.run.launch import initialise_distributed
from weft.techniques.core import CheckpointShard

_WRAPPERS = ("module._orig_mod.", "_orig_mod.module.", "module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile put before every name."""
_COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_LARGEST_COMPANION_BYTES = 1 << 28
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedWeights:
    """What an import has made."""

    folder: Path
    num_tensors: int
    num_bytes: int
    prefix: str
    """Prefix that was taken from every name."""
    left_out: tuple[str, ...]
    """What else lay in the source, with its kind."""
    is_confined: bool
    """Whether the system could keep the process that read the source from connections and programs."""


def import_weights(
    source: str | Path,
    folder: str | Path,
    *,
    recipe: Recipe | str | Path | None = None,
    key: str = "",
    ignore: Sequence[str] = (),
    memory_gb: float | None = None,
) -> ImportedWeights:
    """Convert weights that another program saved.  Call it on one process, outside of any job.

    With a recipe the folder becomes a run that has done no step: `weft train recipe.toml --resume FOLDER` begins with
    the weights, under any plan.  Without one it is a folder of safetensors, with the `config.json` and the tokenizer
    that lie beside the source, for `model.hf` of a recipe.

    Args:
        source: a `.pt`, `.pth`, `.bin` or `.safetensors` file, or a folder of them, or of a distributed checkpoint.
        folder: must not exist, or be empty; it appears complete or not at all.
        recipe: a recipe, or the path of one, whose model the weights are for.
        key: dotted keys below which the weights lie in the source; by default found.
        ignore: globs over names of the source that are left out.
        memory_gb: memory that reading may take; by default three times the size of the source and 1 GB.

    Raises:
        CheckpointError: the source is damaged, holds what only running code could make, or does not fit the recipe.
        RecipeError: the recipe's model is one of Hugging Face, which needs no recipe here.
    """
    source = path_of("the source", source, CheckpointError)
    recipe = load_recipe(recipe) if isinstance(recipe, str | Path) else recipe
    if recipe is not None and recipe.model.hf is not None:
        raise RecipeError(
            f"the recipe's model is that of a folder (model.hf = {recipe.model.hf}), whose weights lie in the folder."
            f" Import without a recipe, and set model.hf = {folder}."
        )
    limit = None if memory_gb is None else int(memory_gb * 1e9)
    with new_export(path_of("the folder", folder, CheckpointError)) as partial:
        scratch = partial / "converted"
        scratch.mkdir(mode=0o700)
        converted = convert(source, scratch, key=key, memory_bytes=limit)
        names = [name for name in converted.weights if not any(fnmatchcase(name, glob) for glob in ignore)]
        if recipe is None:
            prefix, weights = _written(partial, source, converted.weights, names)
        else:
            prefix, weights = _filled(partial, recipe, converted.weights, names)
        num_bytes = sum(weights.shape(name).numel() * weights.dtype(name).itemsize for name in weights)
        shutil.rmtree(scratch)
    return _result(Path(folder), converted, len(weights), num_bytes, prefix)


def _result(folder: Path, converted: Converted, num_tensors: int, num_bytes: int, prefix: str) -> ImportedWeights:
    return ImportedWeights(
        folder=folder,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        prefix=prefix,
        left_out=converted.left_out,
        is_confined=converted.is_confined,
    )


def _written(partial: Path, source: Path, weights: ForeignWeights, names: Sequence[str]) -> tuple[str, ForeignWeights]:
    """Write a folder of safetensors, with what lies beside the source and is no weight."""
    prefix = _common_prefix(names, _WRAPPERS)
    renamed = weights.renamed({name.removeprefix(prefix): name for name in names})
    write_weights(partial, "model.safetensors", renamed)
    beside = source if source.is_dir() else source.parent
    for name in _COMPANIONS:
        path = beside / name
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= _LARGEST_COMPANION_BYTES:
            shutil.copyfile(path, partial / name)
    return prefix, renamed


def _filled(partial: Path, recipe: Recipe, weights: ForeignWeights, names: Sequence[str]) -> tuple[str, ForeignWeights]:
    """Make a run that has done no step, with the weights in its checkpoint."""
    plan, _ = complete_plan(Plan(), recipe, {}, torch.get_num_threads(), is_chosen=False)
    blueprint = build_blueprint(recipe, plan)
    prefix, renamed = _matched(blueprint, weights, names)
    prepared = prepare_data(recipe, data_shape(blueprint, recipe), progress=silent)
    run = RunFolder(partial)
    run.recipe.write_text(dump_recipe(recipe))
    if prepared.tokenizer is not None:
        shutil.copyfile(prepared.tokenizer, partial / "tokenizer.json")
    with initialise_distributed("cpu"):
        mesh = Mesh(plan.mesh, torch.device("cpu"))
        training = create_training(recipe, plan, blueprint, mesh, Recorder(), partial)
        data = open_data(
            recipe,
            data_shape(blueprint, recipe),
            microbatch=plan.microbatch,
            data_ranks=1,
            data_index=0,
            prepared=prepared,
        )
        shards = training.checkpoint_shards()
        _fill(shards, renamed)
        cursor: dict[str, Json] = {**data.state(0)}
        state: dict[str, Json] = {**training.state(), "data": cursor, "skipped_steps": 0}
        Checkpointer(run.checkpoints, provenance={"recipe": recipe.digest, "imported": "weights alone"}).save(
            0, shards, state
        )
        data.close()
        training.close()
        mesh.leave()
    return prefix, renamed


def _matched(blueprint: Blueprint, weights: ForeignWeights, names: Sequence[str]) -> tuple[str, ForeignWeights]:
    """Find each tensor of the model among those of the source, by name and shape.

    Raises:
        CheckpointError: some are missing, left over, or of another shape.
    """
    module = blueprint.module
    wanted = {name: tensor.shape for name, tensor in module.state_dict(keep_vars=True).items()}
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    prefixes = ["", *_WRAPPERS, _common_prefix(names, [names[0].partition(".")[0] + "."] if names else [])]
    prefix = max(prefixes, key=lambda one: sum(name.removeprefix(one) in wanted for name in names))
    have = {name.removeprefix(prefix): name for name in names}
    # A tied tensor has several names and is saved under any of them, or under all.
    for first, *others in _tied(module).values():
        known = next((name for name in (first, *others) if name in have), None)
        if known is not None:
            have.setdefault(first, have[known])
    missing = [name for name in wanted if name in own and name not in have]
    extra = [name for name in have if name not in wanted]
    if missing:
        hint = did_you_mean(missing[0], extra)
        more = f" It has {_listed(extra)} that the model has not.{hint}" if extra else ""
        raise CheckpointError(
            f"the source lacks {len(missing)} of the model's {len(own)} tensors: {_listed(missing)}.{more}"
        )
    if extra:
        hint = did_you_mean(extra[0], wanted)
        raise CheckpointError(
            f"the source has {len(extra)} tensors that the model has not: {_listed(extra)}.{hint} Leave them out by"
            f" --ignore '{extra[0]}', or correct the recipe."
        )
    taken = {name: have[name] for name in wanted if name in own}
    wrong = [
        f"{name} is {list(weights.shape(old))} there and {list(wanted[name])} here"
        for name, old in taken.items()
        if weights.shape(old) != wanted[name]
    ]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} shapes differ: {_listed(wrong)}. Use the sizes of the model that was saved."
        )
    return prefix, weights.renamed(taken)


def _tied(module: torch.nn.Module) -> Mapping[int, list[str]]:
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return by_tensor


def _fill(shards: Sequence[CheckpointShard], weights: Mapping[str, Tensor]) -> None:
    """Put the weights into the parameters, into the buffers, and into their moving average."""
    for shard in shards:
        kind, _, name = shard.name.partition("/")
        if kind not in ("model", "buffer", "average") or name not in weights:
            continue
        tensor = weights[name]
        if tensor.is_floating_point() != shard.tensor.is_floating_point():
            raise CheckpointError(f"{name} is {tensor.dtype} there and {shard.tensor.dtype} here.")
        with torch.no_grad():
            flat = tensor.reshape(-1)[shard.start : shard.start + shard.tensor.numel()]
            shard.tensor.copy_(flat)


def _common_prefix(names: Iterable[str], prefixes: Collection[str]) -> str:
    known = list(names)
    return next((prefix for prefix in prefixes if known and all(name.startswith(prefix) for name in known)), "")


def _listed(items: Sequence[str]) -> str:
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
