"""Sizes and profiles of the reference models, from their shapes."""

from __future__ import annotations

from weft.config.plan import default_ffn_size
from weft.config.recipe import ConvNetShape, DecoderShape, EncoderShape, MlpShape, ReferenceShape
from weft.model.description._plain import profile_of_convnet, profile_of_mlp
from weft.model.profile import ModelSizes, Profile, profile_of_sizes


def sizes_of_shape(shape: ReferenceShape) -> ModelSizes | None:
    """Return the numbers of a transformer; None where it is none."""
    if isinstance(shape, DecoderShape):
        return _decoder(shape)
    return _encoder(shape) if isinstance(shape, EncoderShape) else None


def profile_of_shape(shape: ReferenceShape) -> Profile:
    """Return the operators of a reference model."""
    if isinstance(shape, MlpShape):
        return profile_of_mlp(shape)
    if isinstance(shape, ConvNetShape):
        return profile_of_convnet(shape)
    if isinstance(shape, EncoderShape):
        return profile_of_sizes(_encoder(shape))
    return profile_of_sizes(_decoder(shape))


def _decoder(shape: DecoderShape) -> ModelSizes:
    width = shape.expert_ffn_size or default_ffn_size(shape)
    return ModelSizes(
        name="decoder",
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads or shape.num_heads,
        ffn_size=default_ffn_size(shape),
        vocabulary_size=shape.vocabulary_size,
        sequence_length=shape.sequence_length,
        dropout=shape.dropout,
        tied=shape.tie_embeddings,
        rotary_base=shape.rope_theta,
        norm_epsilon=shape.norm_epsilon,
        num_experts=shape.num_experts,
        top_k=shape.top_k if shape.num_experts else 1,
        expert_ffn_size=width if shape.num_experts else 0,
        shared_ffn_size=shape.shared_experts * width,
        leading_dense_layers=shape.first_dense_layers,
    )


def _encoder(shape: EncoderShape) -> ModelSizes:
    return ModelSizes(
        name="encoder",
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        ffn_size=default_ffn_size(shape),
        vocabulary_size=shape.vocabulary_size,
        sequence_length=shape.sequence_length,
        learned_positions=shape.sequence_length,
        causal=False,
        activation="gelu",
        norm="layer",
        norm_placement="after",
        norm_epsilon=shape.norm_epsilon,
        stem_norm=True,
        rotary=False,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        head="masked",
        head_bias=True,
        dropout=shape.dropout,
        attention_dropout=shape.dropout,
        tied=shape.tie_embeddings,
    )
