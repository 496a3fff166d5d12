"""The task of a model of `transformers`, by the library's own lists of tasks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import RecipeError
from weft.model.families import family_of

TaskName = Literal[
    "causal_lm",
    "masked_lm",
    "seq2seq_lm",
    "sequence_classification",
    "token_classification",
    "image_classification",
    "audio_classification",
    "ctc",
    "speech_to_text",
    "captioning",
    "image_text_pairs",
]


@dataclass(frozen=True, slots=True)
class HubTask:
    """One of the library's tasks."""

    name: TaskName
    auto: str
    """The library's class that makes models for it."""
    listed: str
    """The library's list of the models that there are for it: `model_type` → class."""

    @property
    def is_of_tokens(self) -> bool:
        """Whether samples are one row of tokens, as corpora give them."""
        return self.name in ("causal_lm", "masked_lm")


_TASKS = (
    HubTask("captioning", "AutoModelForImageTextToText", "IMAGE_TEXT_TO_TEXT"),
    HubTask("image_text_pairs", "AutoModelForZeroShotImageClassification", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    HubTask("speech_to_text", "AutoModelForSpeechSeq2Seq", "SPEECH_SEQ_2_SEQ"),
    HubTask("ctc", "AutoModelForCTC", "CTC"),
    HubTask("audio_classification", "AutoModelForAudioClassification", "AUDIO_CLASSIFICATION"),
    HubTask("image_classification", "AutoModelForImageClassification", "IMAGE_CLASSIFICATION"),
    HubTask("seq2seq_lm", "AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
    HubTask("sequence_classification", "AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION"),
    HubTask("token_classification", "AutoModelForTokenClassification", "TOKEN_CLASSIFICATION"),
    HubTask("causal_lm", "AutoModelForCausalLM", "CAUSAL_LM"),
    HubTask("masked_lm", "AutoModelForMaskedLM", "MASKED_LM"),
)
"""A class that is listed for several tasks has the first of them."""
_BY_NAME = {task.name: task for task in _TASKS}


def task_of(path: str, config: Any) -> HubTask:
    """Return the task of a model's `architectures`; without any, of its family.

    Raises:
        RecipeError: there is none that Weft knows how to train.
    """
    names: list[str] = list(config.architectures or ())
    family = family_of(config.model_type)
    if not names:
        return _BY_NAME["causal_lm" if family is None else family.task]
    name = names[0]
    if name.endswith("ForMaskedLM"):
        return _BY_NAME["masked_lm"]
    if name.endswith(("ForCausalLM", "LMHeadModel")) and not _listed(name, _BY_NAME["captioning"]):
        return _BY_NAME["causal_lm"]
    for task in _TASKS:
        if _listed(name, task):
            return task
    known = ", ".join(task.name.replace("_", " ") for task in _TASKS)
    raise RecipeError(
        f'model.hf = "{path}": transformers lists its architecture {name} for no task that Weft trains ({known}).'
        " Change `architectures` in config.json, or use model.factory."
    )


def _listed(name: str, task: HubTask) -> bool:
    lists: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    listed: Mapping[str, Any] = getattr(lists, f"MODEL_FOR_{task.listed}_MAPPING_NAMES", {})
    return any(name == entry or (isinstance(entry, tuple | list) and name in entry) for entry in listed.values())
