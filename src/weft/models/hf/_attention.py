"""Weft's attention inside Hugging Face models: fused where nothing is dropped, else dropout as a module of its own.

Their dropout on attention probabilities is a function call, which no plan could key by sample and layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import RecipeError

IMPLEMENTATION = "weft"
"""`config._attn_implementation` of the families that Weft knows; `add_masks` builds their masks."""

MASKED_IMPLEMENTATION = "weft_masked"
"""The same attention with the masks of transformers, for families with masks of their own (sliding windows)."""

_CHILD = "attention_probability_dropout"
_NAME = "weft_dropout_name"


def register_attention() -> None:
    """Make both implementations known to transformers in this process.

    "weft" has no masks there on purpose: transformers' way to them reads a value back from the device in every forward,
    which stalls a GPU and cannot run on the meta device.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, weft_attention)
    AttentionInterface.register(MASKED_IMPLEMENTATION, weft_attention)
    AttentionMaskInterface.register(MASKED_IMPLEMENTATION, sdpa_mask)


def add_masks(model: nn.Module, *, causal: bool) -> None:
    """Let the model turn padding masks and restarting positions into one boolean mask before its forward runs."""
    model.register_forward_pre_hook(_causal_masks if causal else _padding_masks, with_kwargs=True)


def _padding_masks(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    padding = kwargs.get("attention_mask")
    if padding is None or padding.dim() != 2:
        return None
    return args, kwargs | {"attention_mask": padding[:, None, None, :].bool().expand(-1, 1, padding.shape[1], -1)}


def _causal_masks(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nothing to do in training on packed documents: without a mask, attention is causal."""
    padding, positions, cache = (kwargs.get(name) for name in ("attention_mask", "position_ids", "past_key_values"))
    past = 0 if cache is None else int(cache.get_seq_length())
    if (padding is None and positions is None and past == 0) or (padding is not None and padding.dim() != 2):
        return None
    tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    length, device = tokens.shape[1], tokens.device
    mask = torch.ones(length, past + length, dtype=torch.bool, device=device).tril(past)[None, None]
    if padding is not None:
        mask = mask & padding[:, None, None, :].bool()
    if positions is not None and past == 0:
        restarts = torch.diff(positions, prepend=positions[:, :1] - 1, dim=1) != 1
        documents = restarts.cumsum(1)
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return args, kwargs | {"attention_mask": mask}


def name_attention_dropouts(model: nn.Module) -> list[str]:
    """Give every attention module a dropout module for its probabilities; return these modules' names.

    GPT-2 and BERT have one that they only read the rate of; Llama and its kin keep a number, and get a new child.
    """
    names: list[str] = []
    for name, module in list(model.named_modules()):
        child = _existing_child(module)
        if child is None and isinstance(getattr(module, "attention_dropout", None), float):
            child = _CHILD
            module.add_module(_CHILD, nn.Dropout(module.attention_dropout))  # type: ignore[arg-type]
        if child is not None:
            setattr(module, _NAME, child)
            names.append(f"{name}.{child}")
    return names


def _existing_child(module: nn.Module) -> str | None:
    if not (hasattr(module, "is_causal") and hasattr(module, "scaling")):
        return None  # what every attention module has that calls the attention interface
    for child in ("attn_dropout", "dropout"):
        if isinstance(getattr(module, child, None), nn.Dropout):
            return child
    return None


def weft_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from (batch, heads, length, head_size) and return (batch, length, heads, head_size).

    `dropout` is the rate in training and 0 in evaluation, as the calling module says.

    Raises:
        RecipeError: the model asks for attention sinks or a position bias.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    _refuse_unknown(module, kwargs)
    if dropout == 0.0 and softcap is None:
        mixed, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return mixed, None
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and query.shape[2] > 1:
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    wide = torch.promote_types(scores.dtype, torch.float32)
    probabilities = scores.softmax(-1, dtype=wide).to(query.dtype)
    if dropout > 0.0:
        probabilities = getattr(module, getattr(module, _NAME))(probabilities)
    return (probabilities @ value).transpose(1, 2).contiguous(), None


def _refuse_unknown(module: nn.Module, settings: dict[str, Any]) -> None:
    for name in ("s_aux", "position_bias"):
        if settings.get(name) is not None:
            raise RecipeError(
                f"model.hf: {type(module).__name__} passes {name} to its attention, which Weft's own does not"
                " take. Use a model without it."
            )
