"""What a sample of a model of `transformers` looks like: by what its forward takes, its configuration, and by trying.

Nothing here names a family.  Several shapes may come into question (a spectrogram lies either way round); the model's
own forward, run without memory, says which it takes.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.config.recipe.hf_folder import HfProcessors, read_hf_processors
from weft.errors import RecipeError
from weft.model._task_losses import ctc_loss, multi_label_loss, pair_loss, sigmoid_pair_loss
from weft.model.blueprint import Loss
from weft.model.families import SampleField
from weft.model.hf._tasks import HubTask
from weft.model.losses import class_loss, regression_loss, token_loss
from weft.model.meta_forward import StandIns
from weft.model.samples import draw_integers, field_example

_SIDES = (224, 32, 64)
"""Sides of an image in pixels, where the configuration does not say."""
_FRAMES = (64, 128, 512, 1024)
_WAVES = (6_400, 16_000)
_SHORTEST_WAVE = 400
_LETTERS = 4
_BANDS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim", "n_mels")
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
_Images = Sequence[SampleField]
_REFUSED = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError, StopIteration)
"""Errors of a forward that does not take its inputs."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The inputs of a forward, and the task that it is trained for."""

    fields: Mapping[str, SampleField]
    """Fields of a sample by the forward's keywords, and `labels` where there are any."""
    loss: Loss

    @property
    def inputs(self) -> dict[str, str]:
        """Keyword of the forward → field of the batch."""
        return {name: name for name in self.fields if name != "labels"}


def samples_of(model: Any, task: HubTask, length: int | None, *, where: str) -> Samples:
    """Return the first kind of sample that the model's forward takes.  `model` is on the meta device.

    Beside `config.json`, a tokenizer says that texts are filled up, so that samples have masks; an image processor says
    how large images are.

    Raises:
        RecipeError: it takes none of those that come into question; says what it said of the first.
    """
    first: Exception | None = None
    processors = read_hf_processors(where)
    # The likeliest shapes come first, so most models take the first.
    for samples in _candidates(model, task, length, processors):
        problem = _problem_with(model, samples)
        if problem is None:
            return samples
        first = first or problem
    words = next(iter(str(first).strip().splitlines()), "") or type(first).__name__
    said = "takes nothing that Weft knows how to make" if first is None else f"does not take what it is given: {words}"
    raise RecipeError(
        f'model.hf = "{where}": a {type(model).__name__} for {task.name.replace("_", " ")} {said.rstrip(".")}. Use'
        " model.factory, which returns a weft.model.blueprint.Blueprint whose `samples` describe them."
    )


class _WithoutMemory(TorchDispatchMode):
    """Runs a forward for its shapes; what depends on values is made up."""

    def __init__(self) -> None:
        super().__init__()
        self._stand_ins = StandIns()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._stand_ins.run(func, args, kwargs or {}, "")


def _problem_with(model: nn.Module, samples: Samples) -> Exception | None:
    """Return the model's error for two such samples; None: its forward takes them, and its loss takes the outputs."""
    batch = field_example(samples.fields)(2)
    generator = torch.Generator().manual_seed(0)
    for name, field in samples.fields.items():
        if field.dtype == "int64":
            batch[name] = draw_integers(field, batch[name].shape, 2, generator)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _WithoutMemory():
            outputs = model(**{name: batch[name] for name in samples.inputs})
            total, _ = samples.loss(outputs, batch)
    except RecipeError:
        return None  # what has no answer without memory says nothing about the samples
    except _REFUSED as problem:
        return problem
    return None if total.dim() == 0 else ValueError("its loss is no number")


# ── what comes into question ──────────────────────────────────────────────────────────────────────────────────────────


def _candidates(model: Any, task: HubTask, length: int | None, processors: HfProcessors) -> Iterator[Samples]:
    take: Mapping[str, Callable[..., Iterator[Samples]]] = {
        "seq2seq_lm": _translations,
        "sequence_classification": _classified_texts,
        "token_classification": _tagged_texts,
        "image_classification": _classified_images,
        "image_text_pairs": _pairs,
        "captioning": _captions,
        "audio_classification": _sounds,
        "ctc": _sounds,
        "speech_to_text": _sounds,
    }
    images = list(_images(model.config, processors))
    for samples in take[task.name](model, task, length or 0, images):
        masks = _masks(model, samples, processors)
        if masks:
            yield Samples(_behind_text(samples.fields, masks), samples.loss)
        yield samples


def _masks(model: Any, samples: Samples, processors: HfProcessors) -> dict[str, SampleField]:
    """Return the fields that a tokenizer gives beside tokens, as far as the forward takes them; empty: the folder has
    no tokenizer."""
    text = samples.fields.get("input_ids")
    if processors.tokenizer is None or text is None:
        return {}
    takes, types = _takes(model), int(getattr(model.config.get_text_config(), "type_vocab_size", None) or 0)
    fields = {"attention_mask": SampleField(text.shape, "int64", 2, is_mask=True)}
    if types and "token_type_ids" in _given_by(processors.tokenizer):
        fields["token_type_ids"] = SampleField(text.shape, "int64", types)
    return {name: field for name, field in fields.items() if name in takes}


def _given_by(tokenizer: Mapping[str, Any]) -> Sequence[str]:
    """Names of what a tokenizer of these settings gives."""
    transformers = importlib.import_module("transformers")
    names = tokenizer.get("model_input_names")
    if names is None:
        kind = getattr(transformers, str(tokenizer.get("tokenizer_class")), None)
        names = getattr(kind, "model_input_names", ())
    return [str(name) for name in names] if isinstance(names, list | tuple) else ()


def _behind_text(fields: Mapping[str, SampleField], masks: Mapping[str, SampleField]) -> dict[str, SampleField]:
    joined: dict[str, SampleField] = {}
    for name, field in fields.items():
        joined[name] = field
        if name == "input_ids":
            joined.update(masks)
    return joined


def _takes(model: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters


def _vocabulary(config: Any) -> int:
    return int(getattr(config.get_text_config(), "vocab_size", None) or 2)


def _text(model: Any, length: int) -> dict[str, SampleField]:
    name = "input_ids" if "input_ids" in _takes(model) else str(model.main_input_name)
    return {name: SampleField((length,), "int64", _vocabulary(model.config))}


def _decoded(config: Any, length: int) -> dict[str, SampleField]:
    """Labels, and what a decoder is given: the same, one place later."""
    inner = getattr(config, "decoder", None)
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    known = [getattr(one, name, None) for one in (config, inner) for name in names]
    start = next((value for value in known if isinstance(value, int)), 0)
    vocabulary = _vocabulary(inner if inner is not None and hasattr(inner, "vocab_size") else config)
    return {
        "decoder_input_ids": SampleField((length,), "int64", vocabulary, follows=("labels", start)),
        "labels": SampleField((length,), "int64", vocabulary),
    }


def _translations(model: Any, task: HubTask, length: int, images: _Images) -> Iterator[Samples]:
    yield Samples(_text(model, length) | _decoded(model.config, length), token_loss)


def _classified_texts(model: Any, task: HubTask, length: int, images: _Images) -> Iterator[Samples]:
    label, loss = _label(model.config)
    yield Samples(_text(model, length) | {"labels": label}, loss)


def _tagged_texts(model: Any, task: HubTask, length: int, images: _Images) -> Iterator[Samples]:
    labels = SampleField((length,), "int64", int(model.config.num_labels))
    yield Samples(_text(model, length) | {"labels": labels}, token_loss)


def _label(config: Any) -> tuple[SampleField, Loss]:
    """One label per sample, and the loss that `problem_type` names."""
    count = int(config.num_labels)
    if config.problem_type == "multi_label_classification":
        return SampleField((count,), "float32"), multi_label_loss
    if config.problem_type == "regression" or (config.problem_type is None and count == 1):
        return SampleField((count,), "float32"), regression_loss
    return SampleField((), "int64", count), class_loss


def _classified_images(model: Any, task: HubTask, length: int, images: _Images) -> Iterator[Samples]:
    label, loss = _label(model.config)
    for image in images:
        yield Samples({"pixel_values": image, "labels": label}, loss)


def _pairs(model: Any, task: HubTask, length: int, images: _Images) -> Iterator[Samples]:
    loss = sigmoid_pair_loss if hasattr(model, "logit_bias") else pair_loss
    for image in images:
        yield Samples(_text(model, length) | {"pixel_values": image}, loss)


def _captions(model: Any, task: HubTask, length: int, images: _Images) -> Iterator[Samples]:
    """A prompt that begins with the pieces of an image; or an encoder of images beside a decoder of text."""
    takes, config = _takes(model), model.config
    if "pixel_values" not in takes:
        return
    token = next((value for name in _IMAGE_TOKENS if type(value := getattr(config, name, None)) is int), None)
    for image in images:
        pixels = {"pixel_values": image}
        if "decoder_input_ids" in takes and token is None:
            text = _text(model, length) if "input_ids" in takes else {}
            yield Samples(pixels | text | _decoded(config, length), token_loss)
            continue
        # The prompt has a placeholder for each piece of the image.
        count = 0 if token is None else _pieces(model, image)
        ids = SampleField((count + length,), "int64", _vocabulary(config), prompt=(token or 0, count))
        labels = replace(ids, prompt=(0, 0))
        yield Samples({"input_ids": ids, "pixel_values": image, "labels": labels}, token_loss)


def _pieces(model: Any, image: SampleField) -> int:
    """Tokens that an image becomes; 0 where the model is asked otherwise."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _WithoutMemory():
            features = model.get_image_features(pixel_values=torch.empty(1, *image.shape, device="meta"))
    except (RecipeError, *_REFUSED):
        return 0
    features = getattr(features, "pooler_output", features)
    features = features[0] if isinstance(features, tuple | list) else features
    return int(features.numel() // features.shape[-1]) if isinstance(features, Tensor) else 0


def _sounds(model: Any, task: HubTask, length: int, images: _Images) -> Iterator[Samples]:
    takes = _takes(model)
    name = next((name for name in ("input_features", "input_values") if name in takes), None)
    if name is None:
        return
    config = model.config
    values = 0 if task.name == "speech_to_text" else length
    waves = [*_waves_of(model, values), *_waves(config)]
    for sound in waves if name == "input_values" else _spectrograms(config):
        if task.name == "audio_classification":
            label, loss = _label(config)
            yield Samples({name: sound, "labels": label}, loss)
        elif task.name == "ctc":
            labels = SampleField((_most_letters(model, sound),), "int64", _vocabulary(config))
            blank = int(getattr(config, "pad_token_id", None) or 0)
            yield Samples({name: sound, "labels": labels}, ctc_loss(blank))
        elif "decoder_input_ids" in takes:
            yield Samples({name: sound} | _decoded(config, length), token_loss)


def _most_letters(model: Any, sound: SampleField) -> int:
    """Letters that a sound of this length may surely be labelled with: a quarter of the frames it becomes."""
    frames_of = getattr(model, "_get_feat_extract_output_lengths", None)
    if frames_of is None or len(sound.shape) != 1:
        return _LETTERS
    return max(_LETTERS, int(frames_of(sound.shape[0])) // 4)


def _waves_of(model: Any, length: int) -> Iterator[SampleField]:
    """Waves of the length that was asked for, where it is enough for a label."""
    frames_of = getattr(model, "_get_feat_extract_output_lengths", None)
    if length >= _SHORTEST_WAVE and (frames_of is None or int(frames_of(length)) >= 2 * _LETTERS):
        yield SampleField((length,), "float32")


def _waves(config: Any) -> Iterator[SampleField]:
    yield from (SampleField((samples,), "float32") for samples in _WAVES)
    yield from _both_ways(config)


def _spectrograms(config: Any) -> Iterator[SampleField]:
    yield from _both_ways(config)
    yield from (SampleField((samples,), "float32") for samples in _WAVES)


def _both_ways(config: Any) -> Iterator[SampleField]:
    settings = _settings(config)
    bands = next((value for name, value in settings if name in _BANDS and type(value) is int), 80)
    positions = next((value for name, value in settings if name == "max_source_positions" and value), 0)
    for frames in dict.fromkeys((2 * positions, positions, *_FRAMES)):
        if frames:
            yield from (SampleField(shape, "float32") for shape in ((bands, frames), (frames, bands)))


def _images(config: Any, processors: HfProcessors) -> Iterator[SampleField]:
    settings = _settings(config)
    names = ("num_channels", "in_channels", "in_chans")
    channels = next((value for name, value in settings if name in names and type(value) is int), 3)
    sides = [value for name, value in settings if name in ("image_size", "img_size")]
    sides += [processors.image_size] if processors.image_size is not None else []
    shapes = [tuple(side) if isinstance(side, list | tuple) else (side, side) for side in (*sides, *_SIDES)]
    for shape in dict.fromkeys(shapes):
        if all(type(side) is int for side in shape):
            yield SampleField((channels, *shape), "float32")


def _settings(config: Any) -> list[tuple[str, Any]]:
    """Return a configuration's settings, and those of the configurations in it, the outermost first."""
    own: Mapping[str, Any] = config.to_dict()
    inner = [getattr(config, name) for name in own if hasattr(getattr(config, name, None), "to_dict")]
    return [*own.items(), *(item for setting in inner for item in _settings(setting))]
