"""Make operators from the sizes of a transformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.model.profile._attention import attention_operators
from weft.model.profile._feed_forward import dense_operators, mixture_operators
from weft.model.profile._parts import linear, lookup, norm, residual
from weft.model.profile._profile import Block, Operator, Profile
from weft.model.profile._sizes import ModelSizes


def profile_of_sizes(sizes: ModelSizes, sequence_length: int | None = None) -> Profile:
    """Return the operators of a transformer; another `sequence_length` stretches the samples, not the tables."""
    if sequence_length is not None:
        sizes = replace(sizes, sequence_length=sequence_length)
    return Profile(
        name=sizes.name,
        sequence_length=sizes.sequence_length,
        stem=Block(name="stem", operators=tuple(_stem(sizes)), entry_elements_per_token=0),
        blocks=_blocks(sizes),
        tail=Block(name="tail", operators=tuple(_tail(sizes)), entry_elements_per_token=sizes.hidden_size),
        hidden_size=sizes.hidden_size,
        vocabulary_size=sizes.vocabulary_size if sizes.head in ("vocabulary", "masked") else 0,
        tied=sizes.tied,
        divisible=_divisible(sizes),
        num_experts=sizes.num_experts,
    )


def _blocks(sizes: ModelSizes) -> tuple[Block, ...]:
    made: dict[tuple[bool, int | None], Block] = {}
    blocks: list[Block] = []
    for layer in range(sizes.num_layers):
        # Alike layers share one object: caches of the cost model are keyed by identity.
        key = (sizes.is_mixture(layer), sizes.window_of(layer))
        if key not in made:
            made[key] = _block(sizes, layer)
        blocks.append(made[key])
    return tuple(blocks)


def _block(sizes: ModelSizes, layer: int) -> Block:
    is_mixture = sizes.is_mixture(layer)
    attention = tuple(attention_operators(sizes, layer))
    forward = tuple(mixture_operators(sizes) if is_mixture else dense_operators(sizes, sizes.ffn_size))
    return Block(
        name="mixture" if is_mixture else "dense",
        operators=tuple(_arranged(sizes, attention, forward)),
        entry_elements_per_token=sizes.hidden_size,
    )


def _arranged(sizes: ModelSizes, attention: tuple[Operator, ...], forward: tuple[Operator, ...]) -> Iterator[Operator]:
    """Attention and feed-forward with their norms and residual sums, in the order of computation."""
    placement = sizes.norm_placement
    if placement != "after":
        yield norm("attention.norm", sizes)
    yield from attention
    if placement == "both":
        yield norm("attention.norm_after", sizes, feeds=False)
    yield residual("attention.residual", sizes)
    if placement == "after":
        yield norm("attention.norm", sizes)
    elif placement == "parallel_two":
        # It reads the same input as the first norm, which keeps that already.
        second = norm("ffn.norm", sizes)
        yield replace(second, kept_elements_per_token=sizes.hidden_size)
    elif placement != "parallel":
        yield norm("ffn.norm", sizes)
    yield from forward
    if placement == "both":
        yield norm("ffn.norm_after", sizes, feeds=False)
    yield residual("ffn.residual", sizes)
    if placement == "after":
        yield norm("ffn.norm", sizes)


def _stem(sizes: ModelSizes) -> Iterator[Operator]:
    hidden = sizes.hidden_size
    if sizes.patch_values:
        patches = linear("embedding", hidden, sizes.patch_values, "replicate", bias=True, kept=sizes.patch_values)
        extra = hidden if sizes.class_token else 0
        yield replace(patches, parameters=patches.parameters + extra)
    else:
        yield lookup("embedding", sizes.vocabulary_size, hidden, "vocab")
    if sizes.learned_positions:
        yield lookup("position_embedding", sizes.learned_positions, hidden, "replicate")
    if sizes.token_types:
        yield lookup("type_embedding", sizes.token_types, hidden, "replicate")
    if sizes.stem_norm:
        yield norm("embedding_norm", sizes, feeds=False)
    if sizes.dropout:
        yield residual("embedding_dropout", sizes)


def _tail(sizes: ModelSizes) -> Iterator[Operator]:
    hidden, vocabulary = sizes.hidden_size, sizes.vocabulary_size
    if sizes.norm_placement != "after":
        yield norm("norm", sizes)
    if sizes.head == "classes":
        # Once per sample, counted per token.
        once = 1 / sizes.sequence_length
        yield linear("head", sizes.num_classes, hidden, "replicate", bias=sizes.head_bias, rows=once)
        return
    if sizes.head == "none":
        return
    if sizes.head == "masked":
        yield linear("transform.dense", hidden, hidden, "replicate", bias=True, kept=hidden)
        yield Operator(
            name="transform.activation",
            kind="elementwise",
            elements_moved_per_token=2 * hidden,
            kept_elements_per_token=hidden,
        )
        yield norm("transform.norm", sizes, split="replicate")
    # A tied head has the embedding's weights, which the stem counts.
    own = 0 if sizes.tied else vocabulary * hidden
    bias = vocabulary if sizes.head_bias else 0
    head = linear("head", vocabulary, hidden, "vocab")
    yield replace(head, parameters=own + bias)
    # Logits are accounted apart from activations, by the loss that a layout chooses.
    yield Operator(name="loss", kind="elementwise", split="vocab", elements_moved_per_token=3 * vocabulary)


def _divisible(sizes: ModelSizes) -> tuple[tuple[str, int], ...]:
    named = [("num_heads", sizes.num_heads)]
    if sizes.num_kv_heads is not None and not sizes.kv_rank:
        named.append(("num_kv_heads", sizes.kv_heads))
    if not all(sizes.is_mixture(layer) for layer in range(sizes.num_layers)):
        named.append(("ffn_size", sizes.ffn_size))
    if sizes.num_experts:
        named.append(("expert_ffn_size", sizes.expert_ffn_size))
    if sizes.shared_ffn_size:
        named.append(("shared_ffn_size", sizes.shared_ffn_size))
    if sizes.head in ("vocabulary", "masked"):
        named.append(("vocabulary_size", sizes.vocabulary_size))
    return tuple(named)
