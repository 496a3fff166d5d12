"""Weft's attention inside Hugging Face models: fused where nothing is dropped, else dropout as a module of its own.

Their dropout on attention probabilities is a function call, which no plan could key by sample and layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

from weft.model.attention.dropping import attend_dropping, attend_in_window

IMPLEMENTATION = "weft"
"""`config._attn_implementation` of the families that Weft knows; `add_masks` builds their masks."""

MASKED_IMPLEMENTATION = "weft_masked"
"""The same attention with the masks of transformers, for families with masks of their own (sliding windows)."""

_EAGER = "eager"
"""`config._attn_implementation` of families that write their attention out, with masks of their own."""
_UNMASKED = "weft_unmasked"
"""The same attention of theirs without masks."""
_MADE_FROM = "_weft_made_from"
_MADE_AT = "_weft_made_at"
_LOOKED_AT = 128
"""Queries whose part of a mask is computed to see what it is."""
_CHILD = "attention_probability_dropout"
_NAME = "weft_dropout_name"


def register_attention() -> None:
    """Make the implementations known to transformers in this process.

    "weft" and "weft_unmasked" have no masks there on purpose: transformers' way to them reads a value back from the
    device in every forward, which stalls a GPU and cannot run on the meta device.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, weft_attention)
    AttentionInterface.register(MASKED_IMPLEMENTATION, weft_attention)
    AttentionInterface.register(_UNMASKED, _as_written)
    AttentionMaskInterface.register(MASKED_IMPLEMENTATION, _mask_with_window)
    AttentionMaskInterface.register(_EAGER, _mask_to_add)


def _mask_with_window(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of transformers, which keeps what it was made from for whoever asks what it says (`window_of`).

    Raises what `transformers.masking_utils.sdpa_mask` raises.
    """
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(*args, **kwargs)
    if mask is not None and not torch.compiler.is_compiling():
        setattr(mask, _MADE_FROM, (args, kwargs))
    return mask


def _mask_to_add(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of transformers for written attention, which keeps what it was made from (`mask_says`).

    Raises what `transformers.masking_utils.eager_mask` raises.
    """
    from transformers.masking_utils import eager_mask

    mask: Any = eager_mask(*args, **kwargs)
    if mask is not None and not torch.compiler.is_compiling():
        setattr(mask, _MADE_FROM, (args, kwargs))
        setattr(mask, _MADE_AT, mask._version)
    return mask


def mask_says(mask: Tensor) -> Literal["causal", "full"] | int | None:
    """Return who sees whom by a mask that `_mask_to_add` has made, or how many tokens each sees, itself and those
    before it; None: it says more, or nothing is known of it."""
    args, kwargs = getattr(mask, _MADE_FROM, ((), None))
    if kwargs is None or getattr(mask, _MADE_AT, None) != mask._version:
        return None
    given = dict(_bound(args, kwargs))
    padding: Tensor | None = given.pop("attention_mask", None)
    if padding is not None and (padding.is_meta or not bool(padding.all())):
        return None
    window = given.get("local_size")
    # Also where it is as wide as these samples: longer ones may come.
    if type(window) is int and _says(given, lambda mine, theirs: (theirs <= mine) & (theirs > mine - window)):
        return window
    if _says(given, lambda mine, theirs: theirs <= mine):
        return "causal"
    return "full" if _says(given, lambda mine, theirs: theirs >= 0) else None


def _bound(args: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    from transformers.masking_utils import sdpa_mask

    return inspect.signature(sdpa_mask).bind(*args, **kwargs).arguments


def window_of(mask: Tensor) -> int | None:
    """Return the window of a mask that says nothing but this window; None: it says more, or nothing is known of it."""
    args, kwargs = getattr(mask, _MADE_FROM, ((), None))
    if kwargs is None:
        return None
    given = _bound(args, kwargs)
    window = given.get("local_size")
    if type(window) is not int:
        return None
    return window if _says(given, lambda mine, theirs: (theirs <= mine) & (theirs > mine - window)) else None


def _says(given: Mapping[str, Any], seen: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether a mask shows these keys of each query and nothing more: computed here for some queries."""
    if given.get("attention_mask") is not None or given.get("q_offset") or given.get("kv_offset"):
        return False
    queries, keys = int(given["q_length"]), int(given["kv_length"])
    if queries != keys:
        return False
    # Whoever follows the forward need not see this.
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        few = torch.linspace(0, queries - 1, min(queries, _LOOKED_AT), device="cpu").long()
        mine, theirs = few[None, None, :, None], torch.arange(keys, device="cpu")[None, None, None]
        nothing = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
        try:
            found = given["mask_function"](nothing, nothing, mine, theirs)
            shape = (1, 1, len(few), keys)
            return torch.equal(found.expand(shape), seen(mine, theirs).expand(shape))
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
        rate = _rate(module)
        if child is None and rate is not None:
            child = _CHILD
            module.add_module(_CHILD, nn.Dropout(rate))
        if child is not None:
            setattr(module, _NAME, child)
            names.append(f"{name}.{child}")
    return names


def _rate(module: nn.Module) -> float | None:
    """The rate of an attention module that keeps it as a number."""
    names = ("attention_dropout", "dropout", "attn_dropout") if _attends(module) else ("attention_dropout",)
    return next((rate for name in names if isinstance(rate := getattr(module, name, None), float)), None)


def _attends(module: nn.Module) -> bool:
    """What every attention module has that calls the attention interface."""
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
    `s_aux` has a score for each head that takes part in the softmax and attends to nothing (an attention sink, Xiao et
    al. 2023, https://arxiv.org/abs/2309.17453, learned as in gpt-oss), and `position_bias` scores to add.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    sinks: Tensor | None = kwargs.pop("s_aux", None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    given = kwargs.get("sliding_window")
    window = given if type(given) is int else 0
    is_plain = softcap is None and sinks is None and kwargs.get("position_bias") is None
    # Whoever leaves out a mask of transformers' own means that a window hides nothing.
    hides = attention_mask is not None or key.shape[2] <= window or _makes_no_masks(module)
    if is_plain and causal and window > 0 and hides:
        dropping = getattr(module, getattr(module, _NAME)) if dropout > 0.0 else None
        mixed = attend_in_window(query, key, value, attention_mask, dropping, window=window, scale=scaling)
        return mixed.transpose(1, 2).contiguous(), None
    if dropout == 0.0 and softcap is None and sinks is None:
        mixed, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return mixed, None
    if is_plain:
        dropping = getattr(module, getattr(module, _NAME))
        mixed = attend_dropping(query, key, value, attention_mask, dropping, causal=causal, scale=scaling)
        return mixed.transpose(1, 2).contiguous(), None
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if kwargs.get("position_bias") is not None:
        scores = scores + kwargs["position_bias"]
    probabilities = _softmax(_masked(scores, attention_mask, causal=causal), sinks).to(query.dtype)
    if dropout > 0.0:
        probabilities = getattr(module, getattr(module, _NAME))(probabilities)
    return (probabilities @ value).transpose(1, 2).contiguous(), None


def _as_written(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Attend as the file of a model writes it out."""
    written = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward", weft_attention)
    return written(module, *args, **kwargs)


def _makes_no_masks(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == IMPLEMENTATION


def _masked(scores: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Scores with those that may not count as low as can be; a mask of floats is added, as transformers means it."""
    if mask is None and causal and scores.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(-1, dtype=wide)
    beside = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1, dtype=wide)[..., :-1]


def drop_masks(model: nn.Module, *, written: bool = False) -> list[Any]:
    """Let a model of transformers whose attention needs no masks make none, whatever positions it is given.

    Only where a forward has shown that its attention gets none.  From positions that do not follow one another
    transformers would take it that a sample has several documents.  `written`: nor masks for attention that it writes
    out, which then sees every token, unless who reads it knows better (`weft.model.attention.written`).  Returns the
    configurations of that.
    """
    leaving = [config for config in _configs(model) if written and config._attn_implementation == _EAGER]
    for config in _configs(model):
        if config._attn_implementation == MASKED_IMPLEMENTATION:
            config._attn_implementation = IMPLEMENTATION
    for config in leaving:
        config._attn_implementation = _UNMASKED
    return leaving


@contextmanager
def making_masks(configs: Sequence[Any]) -> Generator[None]:
    """Let a model that writes its attention out make masks after all; `configs` are what `drop_masks` returned."""
    try:
        for config in configs:
            config._attn_implementation = _EAGER
        yield
    finally:
        for config in configs:
            config._attn_implementation = _UNMASKED


def _configs(model: nn.Module) -> list[Any]:
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in found.values() if hasattr(config, "_attn_implementation")]
