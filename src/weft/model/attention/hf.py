"""Weft's attention inside Hugging Face models: fused where nothing is dropped, else dropout as a module of its own.

Their dropout on attention probabilities is a function call, which no plan could key by sample and layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

from weft.model.attention.call import MaskPattern, ScoreMod, attend

IMPLEMENTATION = "weft"
"""`config._attn_implementation` of the families that Weft knows; `add_masks` builds their masks."""

MASKED_IMPLEMENTATION = "weft_masked"
"""Name of the same attention with the masks of transformers, for families with masks of their own (sliding windows)."""

SCORED_TYPES = frozenset({"gemma2", "vaultgemma", "gpt_oss", "mimo_v2_flash"})
"""Types that say of themselves that they take no `scaled_dot_product_attention`, and call the attention interface with
nothing more than a cap (`softcap`) or sinks (`s_aux`), which `weft_attention` does."""
_MADE_FROM = "_weft_made_from"
_LOOKED_AT = 128
"""Queries whose part of a mask is computed to see what it is."""
_CHILD = "attention_probability_dropout"
DROPOUT_NAME = "weft_dropout_name"
"""Attribute of an attention module: the name of its child that drops probabilities."""


def register_attention() -> None:
    """Make the implementations known to transformers in this process.

    "weft" has no masks there on purpose: transformers' way to them reads a value back from the device in every forward,
    which stalls a GPU and cannot run on the meta device.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, weft_attention)
    AttentionInterface.register(MASKED_IMPLEMENTATION, weft_attention)
    AttentionMaskInterface.register(MASKED_IMPLEMENTATION, _mask_with_window)


def _mask_with_window(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of transformers, which keeps what it was made from for whoever asks what it says (`window_of`).

    Raises what `transformers.masking_utils.sdpa_mask` raises.
    """
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(*args, **kwargs)
    if mask is not None and not torch.compiler.is_compiling():
        setattr(mask, _MADE_FROM, (args, kwargs))
    return mask


def _bound(args: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    from transformers.masking_utils import sdpa_mask

    return inspect.signature(sdpa_mask).bind(*args, **kwargs).arguments


def window_of(mask: Tensor) -> int | None:
    """Return the window of a mask that says nothing but this window; None: it says more, or nothing is known of it."""
    args, kwargs = getattr(mask, _MADE_FROM, ((), None))
    if kwargs is None:
        return None
    arguments = _bound(args, kwargs)
    window = arguments.get("local_size")
    if type(window) is not int:
        return None
    return window if _says(arguments, lambda mine, theirs: (theirs <= mine) & (theirs > mine - window)) else None


def _says(arguments: Mapping[str, Any], seen: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether a mask shows these keys of each query and nothing more: computed here for some queries."""
    if arguments.get("attention_mask") is not None or arguments.get("q_offset") or arguments.get("kv_offset"):
        return False
    queries, keys = int(arguments["q_length"]), int(arguments["kv_length"])
    if queries != keys:
        return False
    # Whoever follows the forward need not see this.
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        few = torch.linspace(0, queries - 1, min(queries, _LOOKED_AT), device="cpu").long()
        mine, theirs = few[None, None, :, None], torch.arange(keys, device="cpu")[None, None, None]
        nothing = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
        try:
            visible = arguments["mask_function"](nothing, nothing, mine, theirs)
            shape = (1, 1, len(few), keys)
            return torch.equal(visible.expand(shape), seen(mine, theirs).expand(shape))
        except Exception:  # a function of other tensors, which are without values here
            return False


def add_masks(model: nn.Module, *, causal: bool) -> None:
    """Let the model turn padding masks and restarting positions into one boolean mask before its forward runs."""
    model.register_forward_pre_hook(_causal_masks if causal else _padding_masks, with_kwargs=True)


def _padding_masks(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    padding = kwargs.get("attention_mask")
    if padding is None or padding.dim() != 2:
        return None
    return args, kwargs | {"attention_mask": padding[:, None, None, :].bool().expand(-1, 1, padding.shape[1], -1)}


def _causal_masks(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return no mask: in training on packed documents attention is causal without one."""
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
        rate = _rate(module)
        if child is None and rate is not None:
            child = _CHILD
            module.add_module(_CHILD, nn.Dropout(rate))
        if child is not None:
            setattr(module, DROPOUT_NAME, child)
            names.append(f"{name}.{child}")
    return names


def _rate(module: nn.Module) -> float | None:
    """The rate of an attention module that keeps it as a number."""
    names = ("attention_dropout", "dropout", "attn_dropout") if _attends(module) else ("attention_dropout",)
    return next((rate for name in names if isinstance(rate := getattr(module, name, None), float)), None)


def _attends(module: nn.Module) -> bool:
    """Return whether a module calls the attention interface: it has these attributes."""
    return hasattr(module, "is_causal") and hasattr(module, "scaling")


def _existing_child(module: nn.Module) -> str | None:
    if not _attends(module):
        return None
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

    `dropout` is the rate in training and 0 in evaluation, as the calling module says.  Among the other settings
    `s_aux` has a score for each head that takes part in the softmax and attends to nothing (an attention sink, learned
    as in gpt-oss), `slopes` one for each head (`hf_modules.py`), and `position_bias` scores to add.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    slopes, sinks = kwargs.pop("slopes", None), kwargs.pop("s_aux", None)
    mod = ScoreMod(scale=scaling, softcap=softcap, slopes=slopes, sinks=sinks)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    given, mask = kwargs.get("sliding_window"), attention_mask
    window = given if causal and type(given) is int and given > 0 else None
    # Whoever leaves out a mask of transformers' own means that a window hides nothing.
    if window is not None and mask is None and key.shape[2] > window and not _makes_no_masks(module):
        window = None
    if mod.is_plain and window is None and dropout == 0.0:
        mixed, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, is_causal=causal, **kwargs)
        return mixed, None
    if (bias := kwargs.get("position_bias")) is not None:
        mask = _with_bias(bias, mask, query.shape[2] if causal else 1)
    dropping = getattr(module, getattr(module, DROPOUT_NAME)) if dropout > 0.0 else None
    pattern = MaskPattern(causal=causal, window=window)
    mixed = attend(query, key, value, pattern, mod, mask=mask, dropout=dropping)
    return mixed.transpose(1, 2).contiguous(), None


def _makes_no_masks(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == IMPLEMENTATION


def _with_bias(bias: Tensor, mask: Tensor | None, causal: int) -> Tensor:
    """Scores to add, which hide what a mask hides; without one those of later keys, of `causal` queries if more than
    one."""
    if mask is None and causal > 1:
        mask = torch.ones(causal, bias.shape[-1], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def take_interface(model: Any) -> Callable[[], None]:
    """Let a model that a factory made attend by Weft's attention, where its class calls the interface and drops
    nothing; return what undoes it."""
    takes = getattr(model, "_supports_attention_backend", False)
    if not takes or not model._supports_sdpa and model.config.model_type not in SCORED_TYPES:
        return lambda: None
    if any(_rate(module) or _existing_child(module) for module in model.modules()):
        return lambda: None
    before = {id(config): (config, config._attn_implementation) for config in _configs(model)}
    for config, known in before.values():
        if known in ("sdpa", "eager"):
            config._attn_implementation = MASKED_IMPLEMENTATION

    def undo() -> None:
        for config, known in before.values():
            config._attn_implementation = known

    return undo


def drop_masks(model: nn.Module) -> None:
    """Let a model of transformers whose attention needs no masks make none, whatever positions it is given.

    Only where a forward has shown that its attention gets none.  From positions that do not follow one another
    transformers would take it that a sample has several documents.
    """
    for config in _configs(model):
        if config._attn_implementation == MASKED_IMPLEMENTATION:
            config._attn_implementation = IMPLEMENTATION


def _configs(model: nn.Module) -> list[Any]:
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]
