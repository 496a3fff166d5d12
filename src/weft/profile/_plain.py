"""Profiles of models that are no transformers: perceptrons and convolutional networks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.document import Rules
from weft.errors import RecipeError
from weft.profile._parts import STATISTIC_BYTES, linear
from weft.profile._profile import Block, Operator, Profile

_RULES = Rules(RecipeError)


def pointwise(
    name: str, features: float, *, inputs: int = 1, kept: float = 0.0, kept_bytes: float = 0.0, parameters: int = 0
) -> Operator:
    """An element-wise operator that reads `inputs` times `features` elements of a sample and writes as many."""
    return Operator(
        name=name,
        kind="elementwise",
        parameters=parameters,
        elements_moved_per_token=(inputs + 1) * features,
        kept_elements_per_token=kept,
        kept_bytes_per_token=kept_bytes,
        selective=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSizes:
    """Residual blocks of norm, two linear layers and GELU between them, over a flat input."""

    name: str = "mlp"
    num_layers: int
    input_size: int
    hidden_size: int
    ffn_size: int
    num_classes: int
    dropout: float = 0.0


def profile_of_mlp(sizes: MlpSizes) -> Profile:
    """Return its operators; a token is a sample."""
    hidden, ffn = sizes.hidden_size, sizes.ffn_size
    statistics = 2 * STATISTIC_BYTES
    norm = pointwise("norm", hidden, kept=2 * hidden, kept_bytes=statistics, parameters=2 * hidden)
    block = Block(
        name="perceptron",
        operators=(
            norm,
            linear("up", ffn, hidden, "column", bias=True),
            Operator(
                name="activation",
                kind="elementwise",
                split="column",
                elements_moved_per_token=2 * ffn,
                kept_elements_per_token=2 * ffn,
                selective=True,
            ),
            linear("down", hidden, ffn, "row", bias=True),
            replace(
                pointwise("residual", hidden, inputs=2, kept_bytes=hidden if sizes.dropout else 0),
                dropout=sizes.dropout > 0,
            ),
        ),
        entry_elements_per_token=hidden,
    )
    stem = linear("stem", hidden, sizes.input_size, "replicate", bias=True, kept=sizes.input_size)
    tail = (norm, linear("head", sizes.num_classes, hidden, "replicate", bias=True))
    return Profile(
        name=sizes.name,
        sequence_length=1,
        stem=Block(name="stem", operators=(stem,), entry_elements_per_token=0),
        blocks=(block,) * sizes.num_layers,
        tail=Block(name="tail", operators=tail, entry_elements_per_token=hidden),
        hidden_size=hidden,
        divisible=(("ffn_size", ffn),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionStage:
    """Residual blocks at one resolution."""

    blocks: int
    channels: int
    """Channels that leave each block."""
    image_size: int
    """Height and width that leave each block."""
    middle_channels: int | None = None
    """Channels in the middle of a bottleneck: 1×1 in, 3×3, 1×1 out; None: two 3×3 convolutions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSizes:
    """A residual convolutional classifier."""

    name: str = "convnet"
    image_size: int
    image_channels: int
    stem_channels: int
    stem_kernel: int = 3
    stem_image_size: int
    """Height and width that leave the stem's convolution."""
    stem_norm: bool = False
    pool_size: int | None = None
    """Height and width behind the stem's pooling; None: there is none."""
    stages: tuple[ConvolutionStage, ...]
    num_classes: int
    norm_after: bool = False
    """Norms behind convolutions, as in the first ResNets; else before them, with one more behind the last block."""
    batch_norm: bool = True

    def __post_init__(self) -> None:
        _RULES.at_least(self, 1, "image_size", "image_channels", "stem_channels", "num_classes")
        if not self.stages:
            raise _RULES.refuse(self, "stages", "is empty. Give at least one.")


def profile_of_convolutions(sizes: ConvolutionSizes) -> Profile:
    """Return its operators; a token is a sample."""
    blocks: list[Block] = []
    channels, image = sizes.stem_channels, sizes.pool_size or sizes.stem_image_size
    for stage in sizes.stages:
        first = _residual_block(sizes, stage, channels, image)
        again = _residual_block(sizes, stage, stage.channels, stage.image_size)
        blocks += [first if first != again else again, *[again] * (stage.blocks - 1)]
        channels, image = stage.channels, stage.image_size
    return Profile(
        name=sizes.name,
        sequence_length=1,
        stem=Block(name="stem", operators=tuple(_stem(sizes)), entry_elements_per_token=0),
        blocks=tuple(blocks),
        tail=Block(
            name="tail", operators=tuple(_tail(sizes, channels, image)), entry_elements_per_token=channels * image**2
        ),
        hidden_size=channels,
        has_batch_norm=sizes.batch_norm,
    )


def _convolution(name: str, channels: int, inputs: int, kernel: int, image: int, kept: float = 0.0) -> Operator:
    return Operator(
        name=name,
        kind="convolution",
        rows_per_token=image**2,
        n=channels,
        k=inputs * kernel**2,
        parameters=channels * inputs * kernel**2,
        kept_elements_per_token=kept,
    )


def _norm_and_relu(name: str, channels: int, image: int, *, batch_norm: bool) -> tuple[Operator, Operator]:
    """The norm keeps its input, the rectifier its result, which the convolution behind keeps too."""
    features = channels * image**2
    norm = pointwise(f"{name}.norm", features, kept=features, parameters=2 * channels)
    return (
        replace(norm, batch_statistics=channels if batch_norm else 0),
        pointwise(f"{name}.relu", features, kept=features),
    )


def _residual_block(sizes: ConvolutionSizes, stage: ConvolutionStage, inputs: int, image: int) -> Block:
    channels, middle, out = stage.channels, stage.middle_channels or stage.channels, stage.image_size
    if stage.middle_channels is None:
        layers = [(channels, inputs, 3, image, out), (channels, channels, 3, out, out)]
    else:
        layers = [(middle, inputs, 1, image, image), (middle, middle, 3, image, out), (channels, middle, 1, out, out)]
    operators: list[Operator] = []
    for index, (width, entering, kernel, before, after) in enumerate(layers):
        convolution = _convolution(f"conv{index + 1}", width, entering, kernel, after)
        around = (width, after) if sizes.norm_after else (entering, before)
        pair = _norm_and_relu(f"conv{index + 1}", *around, batch_norm=sizes.batch_norm)
        operators += [convolution, *pair] if sizes.norm_after else [*pair, convolution]
    if sizes.norm_after and (inputs != channels or image != out):
        operators.append(_convolution("shortcut", channels, inputs, 1, out))
        operators.append(_norm_and_relu("shortcut", channels, out, batch_norm=sizes.batch_norm)[0])
    operators.append(pointwise("residual", channels * out**2, inputs=2))
    return Block(name="convolutions", operators=tuple(operators), entry_elements_per_token=inputs * image**2)


def _stem(sizes: ConvolutionSizes) -> Iterator[Operator]:
    entering = sizes.image_channels * sizes.image_size**2
    width, image = sizes.stem_channels, sizes.stem_image_size
    yield _convolution("stem", width, sizes.image_channels, sizes.stem_kernel, image, kept=entering)
    if sizes.stem_norm:
        yield from _norm_and_relu("stem", width, image, batch_norm=sizes.batch_norm)
    if sizes.pool_size is not None:
        pooled = width * sizes.pool_size**2
        yield pointwise("stem.pool", width * image**2, kept_bytes=8 * pooled)


def _tail(sizes: ConvolutionSizes, channels: int, image: int) -> Iterator[Operator]:
    if not sizes.norm_after:
        yield from _norm_and_relu("head", channels, image, batch_norm=sizes.batch_norm)
    yield linear("head.classes", sizes.num_classes, channels, "replicate", bias=True, kept=channels)
