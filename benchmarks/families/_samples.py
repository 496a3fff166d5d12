"""What a sample of a small model looks like: found by what its forward takes, its configuration, and by trying."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families._small import IMAGE, LENGTH
from weft.model.losses import class_loss, token_loss

Loss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
Fields = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Keyword of the forward → shape of one sample, and type."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What a forward takes, and what it is trained for."""

    fields: Fields
    labels: tuple[int, ...]
    """Shape of the labels of one sample."""
    loss: Loss
    vocabulary: int
    """Tokens, and labels, are below this."""
    image_tokens: tuple[int, int] | None = None
    """The token that stands for a piece of an image, and how many of them a prompt begins with."""

    def example(self, batch_size: int) -> dict[str, Tensor]:
        """A batch on the meta device."""
        fields = {**self.fields, "labels": (self.labels, torch.int64), "sample_ids": ((), torch.int64)}
        return {
            name: torch.empty(batch_size, *shape, dtype=kind, device="meta") for name, (shape, kind) in fields.items()
        }

    def draw(self, batch_size: int) -> dict[str, Tensor]:
        """A batch."""
        fields = {**self.fields, "labels": (self.labels, torch.int64)}
        return {
            name: torch.randn(batch_size, *shape)
            if kind.is_floating_point
            else torch.randint(0, self.vocabulary, (batch_size, *shape))
            for name, (shape, kind) in fields.items()
        }


def ctc_loss(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Connectionist temporal classification, summed over samples; the blank is token 0, which labels do not have."""
    logits, labels = outputs.logits, batch["labels"].clamp_min(0) % (outputs.logits.shape[-1] - 1) + 1
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    frames = torch.full((logits.shape[0],), logits.shape[1])
    lengths = torch.full((logits.shape[0],), labels.shape[1])
    total = F.ctc_loss(wide.log_softmax(-1).transpose(0, 1), labels, frames, lengths, reduction="sum")
    return total, total.new_full((), float(logits.shape[0]), dtype=torch.float64)


def pair_loss(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Contrastive: each image's text among all texts of the batch, and the other way round."""
    logits = outputs.logits_per_image
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = torch.arange(logits.shape[0], device=logits.device)
    total = (F.cross_entropy(wide, own, reduction="sum") + F.cross_entropy(wide.t(), own, reduction="sum")) / 2
    return total, total.new_full((), float(logits.shape[0]), dtype=torch.float64)


pair_loss.per_sample = False  # type: ignore[attr-defined]


def samples_of(model: nn.Module, auto: str) -> Samples:
    """The first that the model's forward takes, and that gives what its task is learnt from.

    Raises:
        ValueError: none of those that come into question.
    """
    first = ""
    for samples in _candidates(model, auto):
        batch = samples.draw(2)
        try:
            with torch.no_grad():
                total, _ = samples.loss(run(model, samples, batch), batch)
            if total.dim() == 0 and bool(total.isfinite()):
                return samples
            problem = "the loss of a sample is not finite"
        except Exception as error:  # a forward may raise what it likes about inputs that it does not take
            problem = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        first = first or problem
    raise ValueError(first or "nothing is known that its forward takes")


def run(model: nn.Module, samples: Samples, batch: Mapping[str, Tensor]) -> Any:
    """One forward."""
    inputs = {name: batch[name] for name in samples.fields}
    if samples.image_tokens is not None:
        inputs["input_ids"] = with_image(inputs["input_ids"], *samples.image_tokens)
    return model(**inputs)


def with_image(tokens: Tensor, image_token: int, count: int) -> Tensor:
    """Let a prompt begin with `count` pieces of an image, and have no others."""
    other = torch.where(tokens == image_token, torch.full_like(tokens, image_token - 1), tokens)
    return torch.cat([torch.full_like(tokens[:, :count], image_token), other[:, count:]], 1)


def _candidates(model: Any, auto: str) -> Iterator[Samples]:
    taken = inspect.signature(model.forward).parameters
    config = model.config
    vocabulary = int(getattr(config.get_text_config(), "vocab_size", None) or 10)
    ids: Fields = {"input_ids": ((LENGTH,), torch.int64)}
    if auto in ("AutoModelForCausalLM", "AutoModelForMaskedLM"):
        name = "input_ids" if "input_ids" in taken else model.main_input_name
        yield Samples({name: ids["input_ids"]}, (LENGTH,), token_loss, vocabulary)
    elif auto == "AutoModelForSeq2SeqLM":
        yield Samples(ids | {"decoder_input_ids": ((LENGTH - 4,), torch.int64)}, (LENGTH - 4,), token_loss, vocabulary)
    elif auto == "AutoModelForImageClassification":
        for image in _images(config):
            yield Samples({"pixel_values": (image, torch.float32)}, (), class_loss, config.num_labels)
    elif auto == "AutoModelForImageTextToText":
        yield from _captions(model, taken, vocabulary)
    elif auto == "AutoModelForZeroShotImageClassification":
        for image in _images(config):
            yield Samples(ids | {"pixel_values": (image, torch.float32)}, (), pair_loss, vocabulary)
    else:
        yield from _sounds(model, auto, taken, vocabulary)


def _sounds(model: Any, auto: str, taken: Mapping[str, Any], vocabulary: int) -> Iterator[Samples]:
    name = "input_features" if "input_features" in taken else "input_values" if "input_values" in taken else None
    if name is None:
        return
    for shape in _waves(model.config):
        sound: Fields = {name: (shape, torch.float32)}
        if auto == "AutoModelForAudioClassification":
            yield Samples(sound, (), class_loss, model.config.num_labels)
        elif auto == "AutoModelForCTC":
            yield Samples(sound, (3,), ctc_loss, vocabulary)
        else:
            spoken: Fields = {"decoder_input_ids": ((LENGTH,), torch.int64)}
            yield Samples(sound | spoken, (LENGTH,), token_loss, vocabulary)


def _waves(config: Any) -> Iterator[tuple[int, ...]]:
    """Samples of a wave, or a spectrogram, whichever way round."""
    settings = _settings(config)
    bands = next((value for name, value in settings if name in _BANDS and type(value) is int), 80)
    positions = next((value for name, value in settings if name == "max_source_positions"), 32)
    for frames in (2 * positions, positions, 64, 128):
        yield from ((bands, frames), (frames, bands))
    yield from ((6400,), (16000,), (bands, 1024), (1024, bands))


_BANDS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim", "n_mels")


def _images(config: Any) -> Iterator[tuple[int, int, int]]:
    settings = _settings(config)
    channels = next((value for name, value in settings if name in ("num_channels", "in_channels", "in_chans")), 3)
    sizes = [value for name, value in settings if name in ("image_size", "img_size") and type(value) is int]
    for size in dict.fromkeys((*sizes, IMAGE, 64, 224)):
        yield channels, size, size


def _captions(model: Any, taken: Mapping[str, Any], vocabulary: int) -> Iterator[Samples]:
    if "pixel_values" not in taken:
        return
    config = model.config
    names = ("image_token_id", "image_token_index", "media_token_id")
    token = next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
    for image in _images(config):
        pixels: Fields = {"pixel_values": (image, torch.float32)}
        if "input_ids" not in taken or (token is None and "decoder_input_ids" in taken):
            start: Fields = {"decoder_input_ids": ((LENGTH,), torch.int64)}
            ids: Fields = {"input_ids": ((LENGTH,), torch.int64)} if "input_ids" in taken else {}
            yield Samples(pixels | start | ids, (LENGTH,), token_loss, vocabulary)
            continue
        count = _pieces(model, image) if token is not None else 0
        ids = {"input_ids": ((count + LENGTH,), torch.int64)}
        place = None if token is None or not count else (token, count)
        yield Samples(ids | pixels, (count + LENGTH,), token_loss, vocabulary, place)


def _pieces(model: Any, image: tuple[int, ...]) -> int:
    """Tokens that an image becomes."""
    try:
        with torch.no_grad():
            found = model.get_image_features(pixel_values=torch.randn(1, *image))
    except Exception:  # asked of other images, or of more than an image
        return 0
    found = getattr(found, "pooler_output", found)
    if isinstance(found, list | tuple):
        found = found[0]
    return int(found.reshape(-1, found.shape[-1]).shape[0])


def _settings(config: Any) -> list[tuple[str, Any]]:
    """Its settings and those of the configurations in it, the outermost first."""
    own = config.to_dict()
    inner = [getattr(config, name) for name in own if hasattr(getattr(config, name, None), "to_dict")]
    return [*own.items(), *(item for each in inner for item in _settings(each))]
