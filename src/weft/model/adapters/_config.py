"""Make the configuration of `peft` from a recipe's adapter; refuse settings that cannot be had."""

from __future__ import annotations

import importlib
import json
from dataclasses import fields
from enum import Enum
from typing import Any

from weft.config.recipe import AdapterRecipe
from weft.errors import RecipeError, did_you_mean

_OWN = {
    "r": "rank",
    "lora_alpha": "alpha",
    "alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "peft_type": "method",
}
"""Settings of `peft` that have a name of their own in `[model.adapter]`."""
_REFUSED = {
    "modules_to_save": "it trains whole modules beside the adapters, which Weft does not",
    "trainable_token_indices": "it trains single rows of an embedding, which Weft does not",
    "target_parameters": "it changes parameters by hooks that no plan could follow",
    "layer_replication": "it changes the model's layers: write the larger model as a factory",
    "megatron_config": "how layers are split is the plan's business",
    "megatron_core": "how layers are split is the plan's business",
    "base_model_name_or_path": "the folder of model.hf is written there",
    "inference_mode": "adapters are trained here",
    "runtime_config": "where weights lie is the plan's business",
}
_OF_LORA = (
    *("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "init_lora_weights"),
    *("layers_to_transform", "layers_pattern", "exclude_modules", "task_type", "revision"),
)
"""Settings of LoRA that leave it what it is: the rest are methods of their own that read data or change the base."""
_DECOMPOSING = ("osf", "psoft")
_PLAIN_STARTS = ("gaussian",)


def load_peft() -> Any:
    """Return the package.  Raises `RecipeError` where it is not installed."""
    try:
        return importlib.import_module("peft")
    except ModuleNotFoundError as problem:
        raise RecipeError(
            "model.adapter needs the package peft, which is not installed. Install it with: pip install 'weft[peft]'"
        ) from problem


def adapter_config(adapter: AdapterRecipe) -> Any:
    """Return `peft`'s configuration of the adapter.

    Raises:
        RecipeError: no such method or setting, or one that Weft cannot have; says which are there.
    """
    peft = load_peft()
    kind = _kind_of(peft, adapter.method)
    known = {item.name for item in fields(kind)}
    arguments: dict[str, Any] = {}
    for name, value, choices in (
        ("rank", adapter.rank, ("r",)),
        ("alpha", adapter.alpha, ("lora_alpha", f"{adapter.method}_alpha", "alpha")),
        ("dropout", adapter.dropout or None, (f"{adapter.method}_dropout", "dropout")),
        ("targets", _targets(adapter), ("target_modules",)),
    ):
        if value is None:
            continue
        key = next((choice for choice in choices if choice in known), None)
        if key is None:
            raise RecipeError(f'model.adapter.{name} is nothing that method = "{adapter.method}" has. Remove it.')
        arguments[key] = int(value) if isinstance(value, float) and value.is_integer() and name == "alpha" else value
    for name, value in adapter.settings.items():
        _check_setting(adapter, name, value, known)
        arguments[name] = value
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as problem:
        raise RecipeError(f"model.adapter: peft refuses this {adapter.method} ({problem}). Change it.") from problem


def _kind_of(peft: Any, method: str) -> Any:
    """The method's class of configurations, if it puts adapters into a model's own modules."""
    mapping = importlib.import_module("peft.mapping")
    tuners = {str(kind.value).lower(): tuner for kind, tuner in mapping.PEFT_TYPE_TO_TUNER_MAPPING.items()}
    every = {str(kind.value).lower(): config for kind, config in mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    inside = {name for name, tuner in tuners.items() if hasattr(tuner, "uses_shared_state")}
    apart = {name for name in inside if tuners[name].uses_shared_state}
    possible = sorted(inside - apart - {"xlora", "poly", "shadow", "trainable_tokens", *_DECOMPOSING})
    if method in possible:
        return every[method]
    if method in _DECOMPOSING:
        raise RecipeError(
            f'model.adapter.method = "{method}" replaces the frozen weights by parts of their decomposition, which no'
            f" export of adapters holds; Weft takes: {', '.join(possible)}."
        )
    if method in every:
        why = "shares weights between layers" if method in apart else "adds prompts or models around the model"
        raise RecipeError(
            f'model.adapter.method = "{method}" {why}; Weft takes methods that put adapters into single modules:'
            f" {', '.join(possible)}."
        )
    raise RecipeError(
        f'model.adapter.method = "{method}" is none that peft {peft.__version__} has.{did_you_mean(method, possible)}'
        f" There are {', '.join(possible)}."
    )


def _targets(adapter: AdapterRecipe) -> Any:
    if not adapter.targets:
        return None
    return "all-linear" if adapter.targets == ("all-linear",) else list(adapter.targets)


def _check_setting(adapter: AdapterRecipe, name: str, value: object, known: set[str]) -> None:
    where = f"model.adapter.settings.{name}"
    if name in _OWN:
        raise RecipeError(f"{where} has a place of its own: write model.adapter.{_OWN[name]}.")
    if name not in known:
        possible = known & set(_OF_LORA) if adapter.method == "lora" else known - _REFUSED.keys() - _OWN.keys()
        raise RecipeError(
            f'{where} is no setting of method = "{adapter.method}".{did_you_mean(name, possible)}'
            f" It has {', '.join(sorted(possible))}."
        )
    why = _REFUSED.get(name, "")
    if name == "bias" and value != "none":
        why = "it trains biases of the model itself, which are frozen"
    elif adapter.method == "lora" and name not in _OF_LORA and name != "bias":
        why = why or "it changes frozen weights, or starts from data"
    elif name == "init_lora_weights" and not isinstance(value, bool) and value not in _PLAIN_STARTS:
        why = 'it changes frozen weights, or starts from data. Use true, false or "gaussian"'
    if why:
        raise RecipeError(f"{where} cannot be had: {why}.")


def config_json(config: Any, base: str, task: str) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`."""
    content = {name: _plain(value) for name, value in config.to_dict().items()}
    tasks = {"causal_lm": "CAUSAL_LM"}
    known = {"base_model_name_or_path": base, "inference_mode": True}
    return json.loads(json.dumps(content | known | {"task_type": content.get("task_type") or tasks.get(task)}))


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        plain: Any = value
        return sorted(plain)
    return value.value if isinstance(value, Enum) else value
