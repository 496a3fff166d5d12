"""Text from a trained language model."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from weft.config.recipe import load_recipe
from weft.errors import LaunchError, RecipeError
from weft.events import RunFolder
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.model.reference.generate import generate as continue_tokens
from weft.run.checkpoint.export import read_tensors
from weft.run.data.preparation import load_tokenizer, path_of, separator_of
from weft.techniques.core import ModelLayout, ParameterLayout, materialise


def generate(
    run: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """Return `prompt` and what the model of a run makes of it, from the run's newest checkpoint (its average, if kept).

    Raises:
        LaunchError: the folder is none of a run that trained on text.
        RecipeError: the model is no causal language model, or a setting is out of range.
        CheckpointError: nothing sound has been saved yet.
    """
    folder = RunFolder.open(path_of("the run", run, LaunchError))
    tokenizer_path = folder.path / "tokenizer.json"
    if not folder.recipe.is_file() or not tokenizer_path.is_file():
        raise LaunchError(f"{folder.path} has no recipe.toml and tokenizer.json, so it is no run that trained on text.")
    blueprint = build_model(load_recipe(folder.recipe))
    if blueprint.task != "causal_lm":
        raise RecipeError(f"only a causal language model continues text; this run trained a {blueprint.task} model.")
    tokenizer = load_tokenizer(tokenizer_path)
    module = load_module(folder.path, blueprint)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [separator_of(tokenizer)]
    tokens = continue_tokens(
        module,
        torch.tensor([ids]),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=separator_of(tokenizer),
        window=blueprint.sequence_length,
    )
    return tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True)


def load_module(checkpoint: Path, blueprint: Blueprint) -> nn.Module:
    """Return the whole model on the CPU with the weights of a checkpoint, in evaluation mode."""
    module = copy.deepcopy(blueprint.module)
    layout = ModelLayout()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        layout.entries[name] = ParameterLayout(name=name, shape=tensor.shape)
    materialise(module, blueprint, layout, 0, torch.device("cpu"), torch.float32)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for prefix in ("model/", "buffer/", "average/"):
            for name, saved in read_tensors(checkpoint, prefix):
                tensors[name].copy_(saved)
    return module.eval()
