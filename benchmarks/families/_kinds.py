"""Which family is of which kind: from the library's own mappings of tasks, and from a family's default settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig
from transformers.models.auto import modeling_auto

KINDS = ("decoder", "mixture", "recurrent", "encoder", "encoder-decoder", "vision", "audio", "image-text")

_MAPPINGS = {
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForSpeechSeq2Seq": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "AutoModelForAudioClassification": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForCTC": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "AutoModelForZeroShotImageClassification": modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
_OF_KIND = {
    **dict.fromkeys(("decoder", "mixture", "recurrent"), ("AutoModelForCausalLM",)),
    "encoder": ("AutoModelForMaskedLM",),
    "encoder-decoder": ("AutoModelForSeq2SeqLM",),
    "vision": ("AutoModelForImageClassification",),
    "audio": ("AutoModelForSpeechSeq2Seq", "AutoModelForAudioClassification", "AutoModelForCTC"),
    "image-text": ("AutoModelForImageTextToText", "AutoModelForZeroShotImageClassification"),
}
_NO_DECODER_ALONE = ("AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")
"""Who also has one of these is listed among the causal models for a part of it, or by a mask."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family that may be drawn."""

    model_type: str
    auto: str
    """The class of `transformers` that makes its models."""


def families_of(kind: str) -> list[Family]:
    """All families of a kind, sorted; each once, under the first task that it has."""
    found: dict[str, Family] = {}
    for auto in _OF_KIND[kind]:
        for model_type in sorted(_MAPPINGS[auto]):
            if model_type not in found and _is_of(kind, model_type):
                found[model_type] = Family(model_type, auto)
    return [found[model_type] for model_type in sorted(found)]


def _is_of(kind: str, model_type: str) -> bool:
    if kind in ("vision", "audio", "image-text"):
        return True
    try:
        settings = list(_flat(AutoConfig.for_model(model_type).to_dict()))
    except Exception:  # its defaults make no model: the draw says so when it comes to it
        return kind in ("decoder", "encoder", "encoder-decoder")
    two_stacks = ("is_encoder_decoder", True) in settings
    if kind in ("encoder", "encoder-decoder"):
        return two_stacks == (kind == "encoder-decoder") and not _sees_or_hears(settings)
    if two_stacks or any(model_type in _MAPPINGS[auto] for auto in _NO_DECODER_ALONE) or _sees_or_hears(settings):
        return False
    if _is_recurrent(settings):
        return kind == "recurrent"
    return kind == ("mixture" if _is_mixture(settings) else "decoder")


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings of a configuration and of the configurations in it."""
    for name, value in settings.items():
        yield name, value
        if isinstance(value, dict) and "model_type" in value:
            yield from _flat(value)


def _sees_or_hears(settings: Iterable[tuple[str, Any]]) -> bool:
    return any(name.startswith(("vision_", "audio_")) and isinstance(value, dict) for name, value in settings)


def _is_mixture(settings: Iterable[tuple[str, Any]]) -> bool:
    return any(
        "experts" in name and "per_tok" not in name and type(value) is int and value > 1 for name, value in settings
    )


def _is_recurrent(settings: Iterable[tuple[str, Any]]) -> bool:
    """Whether it has a state, or no attention."""
    known = [(name, value) for name, value in settings if type(value) is int]
    has_state = any("state_size" in name or "ssm" in name or "d_state" in name for name, _ in known)
    return has_state or not any("head" in name for name, _ in known)


def each_kind() -> Iterator[tuple[str, list[Family]]]:
    """All kinds with their families."""
    for kind in KINDS:
        yield kind, families_of(kind)
