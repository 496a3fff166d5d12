"""Hugging Face models from a local `config.json` or folder.  Nothing is downloaded and no remote code runs."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weft.config.recipe import ModelRecipe, hf_config_file, read_hf_config
from weft.errors import RecipeError
from weft.model._isolation import check_isolation
from weft.model.attention.hf import (
    IMPLEMENTATION,
    MASKED_IMPLEMENTATION,
    SCORED_TYPES,
    add_masks,
    name_attention_dropouts,
    register_attention,
)
from weft.model.attention.hf_modules import call_interface, calls_interface
from weft.model.blueprint import Blueprint, Initialiser
from weft.model.examples import token_example
from weft.model.families import Tables, family_of
from weft.model.hf._experts import IMPLEMENTATION as EXPERTS
from weft.model.hf._experts import register_experts
from weft.model.hf._samples import samples_of
from weft.model.hf._tables import description_of_model
from weft.model.hf._tasks import HubTask, task_of
from weft.model.hf._weights import SafetensorsFolder, folder_initialiser, random_initialiser
from weft.model.losses import token_loss
from weft.model.samples import field_example


def build_hf(recipe: ModelRecipe, *, isolated_documents: bool = False) -> Blueprint:
    """Return a model of `transformers` on the meta device with its tables, for the task that its architecture has.

    Weights come from safetensors in the folder when there are any, else they are drawn as the model's class says.
    With `isolated_documents` the batch's positions are passed, from whose restarts transformers finds the documents.

    Raises:
        RecipeError: transformers is absent, there is no config, or the model is of a kind that Weft cannot train.
    """
    assert recipe.hf is not None
    transformers = _transformers()
    folder, config = _read_config(transformers, recipe.hf)
    task = task_of(recipe.hf, config)
    _check_routers(recipe.hf, config)
    exported_config: dict[str, Any] = config.to_dict()
    model = _construct(transformers, config, task)
    _check_documents(recipe.hf, config, task, isolated_documents)
    if isolated_documents and not _has_plain_masks(config):
        check_isolation(transformers, recipe.hf, model.config)
    length = _sequence_length(recipe, config, task)
    description = description_of_model(model, length, where=recipe.hf) if task.is_of_tokens else None
    tables = Tables() if description is None else description.tables
    initialise, notes = _initialiser(model, SafetensorsFolder(folder))
    family = family_of(config.model_type) if task.is_of_tokens else None
    if family is not None:
        family.adapt(model)
    notes = (*tables.notes, *notes, *_attention_notes(model.config))
    blueprint = Blueprint(
        **replace(tables, notes=notes).of_tables,
        **_fed(model, task, length, isolated_documents, recipe),
        module=model,
        name=config.model_type,
        initialise=initialise,
        flops_per_sample=6.0 * sum(parameter.numel() for parameter in model.parameters()) * (length or 1),
        export=None if family is None else family.exported,
        has_known_forward=family is not None,
        export_config=exported_config | {"architectures": [type(model).__name__]},
        keep_dtype=("*inv_freq", "*e_score_correction_bias"),
    )
    if family is not None and family.router:
        from weft.model.hf._routers import routers_of, stacks_of  # loaded where there are mixtures

        blueprint.routers, blueprint.stacks = routers_of(model, family), stacks_of(model)
    if getattr(model.config, "output_router_logits", False):
        from weft.model.hf._routers import with_router_loss

        has_own_masks = isolated_documents and _has_plain_masks(config)
        blueprint.loss = with_router_loss(blueprint.loss, model, recipe.hf, has_own_masks=has_own_masks)
    return blueprint if description is None else blueprint.described_by(description)


def _fed(
    model: Any, task: HubTask, length: int | None, isolated_documents: bool, recipe: ModelRecipe
) -> dict[str, Any]:
    """Return the fields of a blueprint about samples and loss."""
    if task.is_of_tokens:
        assert length is not None
        inputs = {"input_ids": "tokens"} | ({"position_ids": "positions"} if isolated_documents else {})
        return {
            "inputs": inputs,
            "position_input": "position_ids" if _has_plain_masks(model.config) else None,
            "attention": _attention_of(model.config, task),
            "loss": token_loss,
            "task": task.name,
            "vocabulary_size": model.config.get_text_config().vocab_size,
            "example": token_example(length, inputs.values()),
            "sequence_length": length,
        }
    assert recipe.hf is not None
    # Sounds are no sequences of tokens, but the same setting says how long they are.
    samples = samples_of(model, task, length or recipe.sequence_length, where=recipe.hf)
    return {
        "inputs": samples.inputs,
        "loss": samples.loss,
        "samples": samples.fields,
        "example": field_example(samples.fields),
        "sequence_length": length,
    }


def _has_plain_masks(config: Any) -> bool:
    """Whether attention is known to be causal, or to see everything, without windows."""
    family = family_of(config.model_type)
    return family is not None and not family.has_windows(config.to_dict())


def _attention_of(config: Any, task: HubTask) -> str | None:
    if not _has_plain_masks(config):
        return None
    return "causal" if task.name == "causal_lm" else "full"


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as problem:
        raise RecipeError(
            "model.hf needs the package transformers, which is not installed. Install it with: pip install 'weft[hf]'"
        ) from problem


def _read_config(transformers: Any, path: str) -> tuple[Path, Any]:
    """Return the folder and the configuration in it."""
    read_hf_config(path)
    file = hf_config_file(path)
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as problem:
        raise RecipeError(
            f'model.hf = "{path}": transformers cannot read {file} ({_first_line(problem)}).'
            " It must be the config.json of a model that transformers itself knows."
        ) from problem
    return file.parent, config


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def register() -> None:
    """Make Weft's attention, masks and experts known to transformers in this process."""
    register_attention()
    register_experts()


def _construct(transformers: Any, config: Any, task: HubTask) -> Any:
    register()
    config.use_cache = False
    config._experts_implementation = EXPERTS
    family = family_of(config.model_type) if task.is_of_tokens else None
    if family is not None:
        family.prepare(config)
    has_plain_masks = task.is_of_tokens and _has_plain_masks(config)
    attention = IMPLEMENTATION if has_plain_masks else MASKED_IMPLEMENTATION
    try:
        model = _of_config(getattr(transformers, task.auto), config, attention)
        call_interface(model)
        name_attention_dropouts(model)  # of rates that no module of transformers may have looked at
    except Exception as problem:
        raise RecipeError(
            f"model.hf: transformers cannot construct {config.model_type} from its config:"
            f" {_first_line(problem).rstrip('.')}."
        ) from problem
    model.tie_weights()
    model.train()
    if has_plain_masks:
        add_masks(model, causal=task.name == "causal_lm")
    return model


def _of_config(auto: Any, config: Any, attention: str) -> Any:
    """The model on the meta device; with the family's own attention where it takes no other (GPT-J, Falcon)."""
    refused: Exception | None = None
    for implementation in (attention, "sdpa", "eager"):
        try:
            with torch.device("meta"):
                model = auto.from_config(
                    config, attn_implementation=implementation, dtype=torch.float32, trust_remote_code=False
                )
            takes_any = config.model_type in SCORED_TYPES or calls_interface(config)
            if implementation == "eager" or takes_any or getattr(model, "_supports_sdpa", True):
                return model
            # It would take any name, compute by its own code, and add a mask of truth values to its scores (TrOCR).
        except (KeyError, ValueError) as problem:  # what it says of an attention that it does not have
            refused = refused or problem
    assert refused is not None
    raise refused


def _attention_notes(config: Any) -> list[str]:
    implementation = config._attn_implementation
    if implementation in (IMPLEMENTATION, MASKED_IMPLEMENTATION):
        return []
    return [
        f'a {config.model_type} takes no attention but its own: it runs with that of transformers ("{implementation}"),'
        " whatever is fused elsewhere"
    ]


def _initialiser(model: Any, weights: SafetensorsFolder) -> tuple[Initialiser, list[str]]:
    if weights.is_empty:
        return random_initialiser(model), []
    initialise, unread = folder_initialiser(model, weights)
    if not unread:
        return initialise, []
    shown = ", ".join(unread[:3]) + (", …" if len(unread) > 3 else "")
    return initialise, [f"{len(unread)} tensors in {weights.folder} belong to no part of the model: {shown}"]


def _sequence_length(recipe: ModelRecipe, config: Any, task: HubTask) -> int | None:
    """Tokens of a sample; None where it has none."""
    if task.name in ("image_classification", "audio_classification", "ctc"):
        return None
    inner = config.get_text_config() if task.is_of_tokens else config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
    known = (getattr(one, name, None) for one in (config, inner) for name in names)
    limit: int | None = next((value for value in known if isinstance(value, int) and value > 0), None)  # XLNet: -1
    length = recipe.sequence_length or limit
    if length is None:
        raise RecipeError(
            f"model.sequence_length is not given, and nothing in the config.json of this {config.model_type} says how"
            " many tokens a sample has. Give it, such as model.sequence_length = 2048."
        )
    if limit is not None and length > limit:
        raise RecipeError(
            f"model.sequence_length = {length} is longer than the model's max_position_embeddings = {limit}."
            f" Use {limit} or less, or raise it in config.json."
        )
    return length


def _check_routers(path: str, config: Any) -> None:
    """Refuse mixtures whose routers let the samples of a forward change one another: NLLB's drop tokens behind a
    capacity that is counted over all of them, and Doge's mix their rows."""
    kind = config.model_type
    if kind == "nllb-moe" or (kind == "doge" and config.is_moe):
        raise RecipeError(
            f'model.hf = "{path}": the routers of a {kind} let the samples of a microbatch change one another, so that'
            " plans would compute different losses. Use a mixture without a capacity over the batch, or one without"
            " experts."
        )


def _check_documents(path: str, config: Any, task: HubTask, isolated_documents: bool) -> None:
    """Refuse to isolate documents in a model that takes no borders."""
    if isolated_documents and task.name != "causal_lm":
        raise RecipeError(
            f'data.documents = "isolated" cannot be had with model.hf = "{path}": {config.model_type} sees a sample in'
            ' both directions and takes no document borders. Use "packed".'
        )
