"""Profiles of the reference models that are no transformers; a token is a sample."""

from __future__ import annotations

import math
from dataclasses import replace

from weft.config.plan import ModelFacts, default_ffn_size
from weft.config.recipe import ConvNetShape, MlpShape
from weft.model.profile import STATISTIC_BYTES, Block, Operator, OperatorSplit, Profile, linear


def profile_of_mlp(shape: MlpShape) -> Profile:
    """Residual blocks of norm, two linear layers and GELU between them, over a flat input."""
    hidden, ffn = shape.hidden_size, default_ffn_size(shape)
    norm = _pointwise("norm", hidden, kept=2 * hidden, kept_bytes=2 * STATISTIC_BYTES, parameters=2 * hidden)
    residual = _pointwise("residual", hidden, inputs=2, kept_bytes=hidden if shape.dropout else 0)
    block = Block(
        name="perceptron",
        operators=(
            norm,
            linear("up", ffn, hidden, "column", bias=True),
            _pointwise("activation", ffn, kept=2 * ffn, split="column"),
            linear("down", hidden, ffn, "row", bias=True),
            replace(residual, dropout=shape.dropout > 0),
        ),
        entry_elements_per_token=hidden,
    )
    stem = linear("stem", hidden, shape.input_size, "replicate", bias=True, kept=shape.input_size)
    tail = (norm, linear("head", shape.num_classes, hidden, "replicate", bias=True))
    return Profile(
        name="mlp",
        sequence_length=1,
        stem=Block(name="stem", operators=(stem,), entry_elements_per_token=0),
        blocks=(block,) * shape.num_layers,
        tail=Block(name="tail", operators=tail, entry_elements_per_token=hidden),
        hidden_size=hidden,
        divisible=(("ffn_size", ffn),),
    )


def profile_of_convnet(shape: ConvNetShape) -> Profile:
    """Residual blocks of two convolutions, each behind a norm and a rectifier."""
    channels, features = shape.channels, shape.channels * shape.image_size**2
    operators = (
        *_norm_and_relu("conv1", shape),
        replace(_convolution("conv1", shape, channels, "column"), summed_elements_per_token=features),
        *_norm_and_relu("conv2", shape, "column"),
        _convolution("conv2", shape, channels, "row"),
        _pointwise("residual", features, inputs=2),
    )
    stem = _convolution("stem", shape, shape.image_channels)
    stem = replace(stem, kept_elements_per_token=shape.image_channels * shape.image_size**2)
    head = linear("head.classes", shape.num_classes, channels, "replicate", bias=True, kept=channels)
    return Profile(
        name="convnet",
        sequence_length=1,
        stem=Block(name="stem", operators=(stem,), entry_elements_per_token=0),
        blocks=(Block(name="convolutions", operators=operators, entry_elements_per_token=features),) * shape.num_layers,
        tail=Block(name="tail", operators=(*_norm_and_relu("head", shape), head), entry_elements_per_token=features),
        hidden_size=channels,
        divisible=(("channels", channels) if shape.norm == "batch" else ("norm_groups", channels // _grouped(shape)),),
        facts=ModelFacts(has_batch_norm=shape.norm == "batch"),
    )


def _pointwise(
    name: str,
    features: float,
    *,
    inputs: int = 1,
    kept: float = 0.0,
    kept_bytes: float = 0.0,
    parameters: int = 0,
    split: OperatorSplit = "replicate",
) -> Operator:
    """An element-wise operator that reads `inputs` times `features` elements of a sample and writes as many."""
    return Operator(
        name=name,
        kind="elementwise",
        split=split,
        parameters=parameters,
        elements_moved_per_token=(inputs + 1) * features,
        kept_elements_per_token=kept,
        kept_bytes_per_token=kept_bytes,
        selective=True,
    )


def _grouped(shape: ConvNetShape) -> int:
    """Channels of a group norm's group."""
    return math.gcd(shape.channels, 8)


def _convolution(name: str, shape: ConvNetShape, inputs: int, split: OperatorSplit = "replicate") -> Operator:
    """3 × 3, at the resolution of the image."""
    k = inputs * 3**2
    rows = shape.image_size**2
    return Operator(
        name=name,
        kind="convolution",
        split=split,
        rows_per_token=rows,
        n=shape.channels,
        k=k,
        parameters=shape.channels * k,
    )


def _norm_and_relu(name: str, shape: ConvNetShape, split: OperatorSplit = "replicate") -> tuple[Operator, Operator]:
    """The norm keeps its input, the rectifier its result, which the convolution behind keeps too."""
    features = shape.channels * shape.image_size**2
    norm = _pointwise(f"{name}.norm", features, kept=features, parameters=2 * shape.channels, split=split)
    return (
        replace(norm, batch_statistics=shape.channels if shape.norm == "batch" else 0),
        _pointwise(f"{name}.relu", features, kept=features, split=split),
    )
