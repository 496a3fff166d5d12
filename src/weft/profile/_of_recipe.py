"""Profiles of what a recipe names: reference models, and Hugging Face models from their `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.errors import RecipeError
from weft.plan import ModelFacts, default_ffn_size
from weft.profile._plain import (
    ConvolutionSizes,
    ConvolutionStage,
    MlpSizes,
    profile_of_convolutions,
    profile_of_mlp,
)
from weft.profile._profile import Profile
from weft.profile._sizes import ModelSizes
from weft.profile._transformer import profile_of_sizes
from weft.recipe import ConvNetShape, DecoderShape, EncoderShape, MlpShape, Recipe, read_hf_config


def profile_of(recipe: Recipe, facts: ModelFacts) -> Profile | None:
    """Return the profile of a recipe's model: a reference model, or a Hugging Face family whose sizes Weft reads.
    None for what only building it would tell: a factory's, other families.

    Raises:
        RecipeError: `model.hf` names no readable `config.json`.
    """
    shape = recipe.model.shape
    if isinstance(shape, MlpShape):
        profile = profile_of_mlp(_mlp(shape))
    elif isinstance(shape, ConvNetShape):
        profile = profile_of_convolutions(_convnet(shape))
    else:
        sizes = sizes_of(recipe, facts)
        if sizes is None:
            return None
        profile = profile_of_sizes(sizes)
    divisible = profile.divisible if facts.divisible is None else tuple(facts.divisible.items())
    batch_norm = profile.has_batch_norm if facts.has_batch_norm is None else facts.has_batch_norm
    return replace(
        profile,
        name=facts.name,
        divisible=divisible,
        can_be_cut=not facts.no_stages,
        has_batch_norm=batch_norm,
        per_sample_loss=facts.per_sample_loss,
    )


def sizes_of(recipe: Recipe, facts: ModelFacts) -> ModelSizes | None:
    """Return the numbers of a recipe's transformer; None where it is none, or of a family that Weft cannot read."""
    shape = recipe.model.shape
    if isinstance(shape, DecoderShape):
        return _decoder(shape)
    if isinstance(shape, EncoderShape):
        return _encoder(shape)
    if recipe.model.hf is None or facts.num_blocks is None:
        return None
    config = read_hf_config(recipe.model.hf)
    readers = {"gpt2": _gpt2, "bert": _bert}
    reader = readers.get(facts.name, _llama)
    try:
        return reader(config, facts.sequence_length or 1)
    except RecipeError as impossible:
        raise RecipeError(
            f'model.hf = "{recipe.model.hf}": its config.json makes no {facts.name}: {impossible}'
        ) from None


def _decoder(shape: DecoderShape) -> ModelSizes:
    return ModelSizes(
        name="decoder",
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        ffn_size=default_ffn_size(shape) or 0,
        vocabulary_size=shape.vocabulary_size,
        sequence_length=shape.sequence_length,
        dropout=shape.dropout,
        tied=shape.tie_embeddings,
        rotary_base=shape.rope_theta,
        norm_epsilon=shape.norm_epsilon,
    )


def _encoder(shape: EncoderShape) -> ModelSizes:
    return replace(
        _two_sided(shape.num_layers, shape.hidden_size, shape.num_heads, default_ffn_size(shape) or 0),
        name="encoder",
        vocabulary_size=shape.vocabulary_size,
        sequence_length=shape.sequence_length,
        learned_positions=shape.sequence_length,
        dropout=shape.dropout,
        attention_dropout=shape.dropout,
        tied=shape.tie_embeddings,
        norm_epsilon=shape.norm_epsilon,
    )


def _two_sided(layers: int, hidden: int, heads: int, ffn: int) -> ModelSizes:
    """A BERT."""
    return replace(
        _biased(layers, hidden, heads, ffn),
        causal=False,
        norm_placement="after",
        stem_norm=True,
        head="masked",
        head_bias=True,
    )


def _biased(layers: int, hidden: int, heads: int, ffn: int) -> ModelSizes:
    return ModelSizes(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=ffn,
        vocabulary_size=1,
        sequence_length=1,
        activation="gelu",
        norm="layer",
        rotary=False,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
    )


def _mlp(shape: MlpShape) -> MlpSizes:
    return MlpSizes(
        num_layers=shape.num_layers,
        input_size=shape.input_size,
        hidden_size=shape.hidden_size,
        ffn_size=default_ffn_size(shape) or 0,
        num_classes=shape.num_classes,
        dropout=shape.dropout,
    )


def _convnet(shape: ConvNetShape) -> ConvolutionSizes:
    return ConvolutionSizes(
        image_size=shape.image_size,
        image_channels=shape.image_channels,
        stem_channels=shape.channels,
        stem_image_size=shape.image_size,
        stages=(ConvolutionStage(blocks=shape.num_layers, channels=shape.channels, image_size=shape.image_size),),
        num_classes=shape.num_classes,
        batch_norm=shape.norm == "batch",
    )


def _llama(config: Mapping[str, Any], length: int) -> ModelSizes:
    """Llama, Mistral, Qwen 2 (biases on query, key and value) and Qwen 3 (norms on the heads of query and key)."""
    kind, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    biased = bool(config.get("attention_bias"))
    return ModelSizes(
        name=kind,
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or (128 if kind == "qwen3" else None),
        ffn_size=config["intermediate_size"],
        vocabulary_size=config["vocab_size"],
        sequence_length=length,
        window=config.get("sliding_window") if kind == "mistral" else None,
        qk_norm="head" if kind == "qwen3" else "none",
        qkv_bias=biased or kind == "qwen2",
        output_bias=biased and kind != "qwen2",
        ffn_bias=bool(config.get("mlp_bias")),
        attention_dropout=float(config.get("attention_dropout") or 0.0),
        rotary_base=_rotary_base(config),
        norm_epsilon=float(config.get("rms_norm_eps") or 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _rotary_base(config: Mapping[str, Any]) -> float:
    """Transformers 5 writes `rope_parameters`, older releases `rope_theta`."""
    parameters = config.get("rope_parameters")
    table = parameters if isinstance(parameters, Mapping) else config
    return float(table.get("rope_theta") or config.get("rope_theta") or 10_000.0)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _gpt2(config: Mapping[str, Any], length: int) -> ModelSizes:
    hidden = config.get("n_embd", 768)
    sizes = _biased(config.get("n_layer", 12), hidden, config.get("n_head", 12), config.get("n_inner") or 4 * hidden)
    return replace(
        sizes,
        name="gpt2",
        vocabulary_size=config.get("vocab_size", 50257),
        sequence_length=length,
        learned_positions=config.get("n_positions", 1024),
        dropout=float(config.get("resid_pdrop", 0.1)),
        attention_dropout=float(config.get("attn_pdrop", 0.1)),
        tied=bool(config.get("tie_word_embeddings", True)),
    )


def _bert(config: Mapping[str, Any], length: int) -> ModelSizes:
    sizes = _two_sided(
        config.get("num_hidden_layers", 12),
        config.get("hidden_size", 768),
        config.get("num_attention_heads", 12),
        config.get("intermediate_size", 3072),
    )
    return replace(
        sizes,
        name="bert",
        vocabulary_size=config.get("vocab_size", 30522),
        sequence_length=length,
        learned_positions=config.get("max_position_embeddings", 512),
        token_types=config.get("type_vocab_size", 2),
        dropout=float(config.get("hidden_dropout_prob", 0.1)),
        attention_dropout=float(config.get("attention_probs_dropout_prob", 0.1)),
        tied=bool(config.get("tie_word_embeddings", True)),
    )
