"""What a plan must know of a model, found without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import RecipeError
from weft.recipe import (
    ConvNetShape,
    DecoderShape,
    EncoderShape,
    MlpShape,
    ModelRecipe,
    Recipe,
    ReferenceShape,
    has_sliding_windows,
    read_hf_config,
)

WINDOWS = "its attention looks through sliding windows, whose masks are made outside the blocks"
"""Why a model with windows has no stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a model.  None means that only building the model would tell; checks that need it are then left out."""

    name: str = "model"
    """For messages and the first lines of a run: `decoder`, `llama`, a factory's name."""
    num_blocks: int | None = None
    """Repeated blocks of the model."""
    no_stages: str = ""
    """Why nothing says where one block ends and the next begins: the model then gets no pipeline stages, no
    recomputation and no shared sequence, which all need that.  Empty: it may be cut between any two blocks, or only
    building it would tell."""
    divisible: Mapping[str, int] | None = field(default=None, hash=False)
    """Named sizes that the tensor axis must divide; empty: no layer of it can be split."""
    no_tensor: str = ""
    """Why no layer can be split, where `divisible` is empty and the reason is known."""
    num_parameters: int | None = None
    """Tied ones once."""
    block_parameters: int | None = None
    """Of one block."""
    hidden_size: int | None = None
    ffn_size: int | None = None
    vocabulary_size: int | None = None
    sequence_length: int | None = None
    """None where samples are no sequences."""
    activation_elements_per_block: int | None = None
    """Elements that one block keeps for its backward, per sample, without recomputation."""
    tied: bool | None = None
    """Whether the embedding and the head share their weight."""
    has_batch_norm: bool | None = None
    per_sample_loss: bool = True
    """Whether the loss is a sum over samples; if not, all samples of a step must meet in one microbatch."""


def facts_of(recipe: Recipe) -> ModelFacts:
    """Return what a recipe says of its model: sizes of a reference model, those in a Hugging Face `config.json`,
    and next to nothing for a factory.

    Raises:
        RecipeError: when `model.hf` names no readable `config.json`.
    """
    model = recipe.model
    if isinstance(model.shape, DecoderShape):
        return _decoder(model.shape)
    if isinstance(model.shape, EncoderShape):
        return _encoder(model.shape)
    if isinstance(model.shape, MlpShape):
        return _mlp(model.shape)
    if isinstance(model.shape, ConvNetShape):
        return _convnet(model.shape)
    if model.hf is not None:
        return _hugging_face(model, model.hf)
    return ModelFacts(name=model.factory or "model", sequence_length=model.sequence_length)


def default_ffn_size(shape: ReferenceShape) -> int | None:
    """Return the feed-forward width of a reference model, computed where its shape leaves it out."""
    if isinstance(shape, DecoderShape):
        return shape.ffn_size or -(-8 * shape.hidden_size // (3 * 64)) * 64
    if isinstance(shape, ConvNetShape):
        return None
    return shape.ffn_size or 4 * shape.hidden_size


def _decoder(shape: DecoderShape) -> ModelFacts:
    hidden, ffn = shape.hidden_size, default_ffn_size(shape) or 0
    kv_heads = shape.num_kv_heads or shape.num_heads
    kv_size = hidden // shape.num_heads * kv_heads
    block = 2 * hidden * hidden + 2 * hidden * kv_size + 3 * hidden * ffn + 2 * hidden
    tables = shape.vocabulary_size * hidden * (1 if shape.tie_embeddings else 2)
    return ModelFacts(
        name="decoder",
        num_blocks=shape.num_layers,
        divisible={
            "num_heads": shape.num_heads,
            "num_kv_heads": kv_heads,
            "ffn_size": ffn,
            "vocabulary_size": shape.vocabulary_size,
        },
        num_parameters=tables + shape.num_layers * block + hidden,
        block_parameters=block,
        hidden_size=hidden,
        ffn_size=ffn,
        vocabulary_size=shape.vocabulary_size,
        sequence_length=shape.sequence_length,
        activation_elements_per_block=shape.sequence_length * (8 * hidden + 2 * kv_size + 4 * ffn),
        tied=shape.tie_embeddings,
        has_batch_norm=False,
    )


def _encoder(shape: EncoderShape) -> ModelFacts:
    hidden, ffn, vocabulary = shape.hidden_size, default_ffn_size(shape) or 0, shape.vocabulary_size
    block = 4 * (hidden * hidden + hidden) + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    stem = (vocabulary + shape.sequence_length + 2) * hidden
    head = hidden * hidden + 3 * hidden + vocabulary + (0 if shape.tie_embeddings else vocabulary * hidden)
    return ModelFacts(
        name="encoder",
        num_blocks=shape.num_layers,
        divisible={"num_heads": shape.num_heads, "ffn_size": ffn, "vocabulary_size": vocabulary},
        num_parameters=stem + shape.num_layers * block + head,
        block_parameters=block,
        hidden_size=hidden,
        ffn_size=ffn,
        vocabulary_size=vocabulary,
        sequence_length=shape.sequence_length,
        activation_elements_per_block=_plain_activations(shape.sequence_length, hidden, ffn, shape.num_heads),
        tied=shape.tie_embeddings,
        has_batch_norm=False,
    )


def _plain_activations(length: int, hidden: int, ffn: int, heads: int) -> int:
    """Elements kept by a block with biases, dropout and attention whose probabilities are written out."""
    return length * (10 * hidden + 2 * ffn) + 3 * heads * length * length


def _mlp(shape: MlpShape) -> ModelFacts:
    hidden, ffn = shape.hidden_size, default_ffn_size(shape) or 0
    block = 2 * hidden + 2 * hidden * ffn + ffn + hidden
    ends = shape.input_size * hidden + hidden + 2 * hidden + hidden * shape.num_classes + shape.num_classes
    return ModelFacts(
        name="mlp",
        num_blocks=shape.num_layers,
        divisible={"ffn_size": ffn},
        num_parameters=ends + shape.num_layers * block,
        block_parameters=block,
        hidden_size=hidden,
        ffn_size=ffn,
        activation_elements_per_block=3 * hidden + 2 * ffn,
        tied=False,
        has_batch_norm=False,
    )


def _convnet(shape: ConvNetShape) -> ModelFacts:
    width = shape.channels
    block = 18 * width * width + 4 * width
    ends = 9 * shape.image_channels * width + 2 * width + width * shape.num_classes + shape.num_classes
    return ModelFacts(
        name="convnet",
        num_blocks=shape.num_layers,
        divisible={},
        num_parameters=ends + shape.num_layers * block,
        block_parameters=block,
        hidden_size=width,
        activation_elements_per_block=6 * width * shape.image_size**2,
        tied=False,
        has_batch_norm=shape.norm == "batch",
    )


def _hugging_face(model: ModelRecipe, folder: str) -> ModelFacts:
    config = read_hf_config(folder)
    kind = str(config.get("model_type", "model"))
    readers = {"gpt2": _gpt2, "bert": _bert, **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama)}
    if kind not in readers:
        return ModelFacts(name=kind, sequence_length=model.sequence_length, vocabulary_size=config.get("vocab_size"))
    try:
        return readers[kind](config, model.sequence_length)
    except KeyError as missing:
        raise RecipeError(f'model.hf = "{folder}": its config.json, of a {kind}, has no {missing.args[0]}.') from None


def _llama(config: Mapping[str, Any], length: int | None) -> ModelFacts:
    """Llama, Mistral, Qwen 2 (biases on query, key and value) and Qwen 3 (norms on the heads of query and key)."""
    hidden, heads, ffn = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    kind, blocks, vocabulary = config["model_type"], config["num_hidden_layers"], config["vocab_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
    size, kv_size = head_size * heads, head_size * kv_heads
    biases = size + 2 * kv_size if kind == "qwen2" or config.get("attention_bias") else 0
    biases += hidden if config.get("attention_bias") and kind != "qwen2" else 0
    biases += 2 * ffn + hidden if config.get("mlp_bias") else 0
    norms = 2 * hidden + (2 * head_size if kind == "qwen3" else 0)
    block = 2 * hidden * (size + kv_size) + 3 * hidden * ffn + biases + norms
    tied = bool(config.get("tie_word_embeddings", False))
    length = length or config.get("max_position_embeddings")
    return ModelFacts(
        name=kind,
        num_blocks=blocks,
        no_stages=WINDOWS if has_sliding_windows(config) else "",
        divisible={
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": ffn,
            "vocab_size": vocabulary,
        },
        num_parameters=vocabulary * hidden * (1 if tied else 2) + blocks * block + hidden,
        block_parameters=block,
        hidden_size=hidden,
        ffn_size=ffn,
        vocabulary_size=vocabulary,
        sequence_length=length,
        activation_elements_per_block=length * (6 * hidden + 2 * size + 2 * kv_size + 4 * ffn) if length else None,
        tied=tied,
        has_batch_norm=False,
    )


def _gpt2(config: Mapping[str, Any], length: int | None) -> ModelFacts:
    hidden, heads, blocks = config.get("n_embd", 768), config.get("n_head", 12), config.get("n_layer", 12)
    positions, vocabulary = config.get("n_positions", 1024), config.get("vocab_size", 50257)
    ffn = config.get("n_inner") or 4 * hidden
    block = 4 * (hidden * hidden + hidden) + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    tied = bool(config.get("tie_word_embeddings", True))
    length = length or int(positions)
    tables = vocabulary * hidden * (1 if tied else 2) + positions * hidden
    return ModelFacts(
        name="gpt2",
        num_blocks=blocks,
        divisible={"num_attention_heads": heads, "n_inner": ffn, "vocab_size": vocabulary},
        num_parameters=tables + blocks * block + 2 * hidden,
        block_parameters=block,
        hidden_size=hidden,
        ffn_size=ffn,
        vocabulary_size=vocabulary,
        sequence_length=length,
        activation_elements_per_block=_plain_activations(length, hidden, ffn, heads),
        tied=tied,
        has_batch_norm=False,
    )


def _bert(config: Mapping[str, Any], length: int | None) -> ModelFacts:
    hidden, heads = config.get("hidden_size", 768), config.get("num_attention_heads", 12)
    blocks, ffn = config.get("num_hidden_layers", 12), config.get("intermediate_size", 3072)
    positions, vocabulary = config.get("max_position_embeddings", 512), config.get("vocab_size", 30522)
    block = 4 * (hidden * hidden + hidden) + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    stem = (vocabulary + positions + config.get("type_vocab_size", 2) + 2) * hidden
    tied = bool(config.get("tie_word_embeddings", True))
    head = hidden * hidden + 3 * hidden + vocabulary + (0 if tied else vocabulary * hidden)
    length = length or int(positions)
    return ModelFacts(
        name="bert",
        num_blocks=blocks,
        divisible={"num_attention_heads": heads, "intermediate_size": ffn, "vocab_size": vocabulary},
        num_parameters=stem + blocks * block + head,
        block_parameters=block,
        hidden_size=hidden,
        ffn_size=ffn,
        vocabulary_size=vocabulary,
        sequence_length=length,
        activation_elements_per_block=_plain_activations(length, hidden, ffn, heads),
        tied=tied,
        has_batch_norm=False,
    )
