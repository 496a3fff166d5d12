"""Split and cut tables of Hugging Face families: from the model's own plans where it has them, else Weft's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.models._blueprint import CutTable, Localise, SplitRule
from weft.models._costs import TransformerCost
from weft.plan import WINDOWS
from weft.recipe import SplitKind, has_sliding_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What Weft knows of one family of models."""

    split: Sequence[SplitRule] = ()
    localise: Sequence[Localise] = ()
    divisible: Mapping[str, int] = field(default_factory=dict[str, int])
    cut: CutTable | None = None
    vocabulary_head: str | None = None
    cost: TransformerCost | None = None
    notes: Sequence[str] = ()
    no_stages: str = ""
    """Why there is no cut table."""
    no_tensor: str = ""
    """Why there are no split rules."""


def has_plain_masks(config: Any) -> bool:
    """Whether attention is causal (or sees everything), without windows."""
    if config.model_type in ("gpt2", "bert"):
        return True
    return config.model_type in _LLAMA_LIKE and not has_sliding_windows(config.to_dict())


_LLAMA_LIKE = ("llama", "qwen2", "qwen3", "mistral")


def family_of(config: Any, model: Any, sequence_length: int) -> Family:
    """Return the tables for a constructed model (`config` its configuration)."""
    builders: dict[str, Callable[[Any, Any, int], Family]] = {
        "gpt2": _gpt2,
        "bert": _bert,
        **dict.fromkeys(_LLAMA_LIKE, _llama),
    }
    family = builders.get(config.model_type, _unknown)(config, model, sequence_length)
    if family.cut is not None and not has_plain_masks(config):
        return replace(family, cut=None, no_stages=WINDOWS, notes=(f"{WINDOWS}: no pipeline stages.",))
    return family


_STYLES: dict[str, tuple[SplitKind, bool]] = {
    "colwise": ("column", False),
    "colwise_gather_output": ("column", True),
    "colwise_rep": ("column", True),
    "rowwise": ("row", False),
    "embedding_rowwise": ("vocab", False),
    "sequence_parallel": ("sequence", False),
    "replicated_with_grad_allreduce": ("heads", False),
}
"""transformers' tensor-parallel styles → (kind, gather_output)."""


def translate_plan(model: Any) -> tuple[list[SplitRule], list[str]]:
    """Translate the model's own tensor-parallel plan; return the rules and the styles that have no translation."""
    base: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    head: Mapping[str, str] = getattr(type(model), "_tp_plan", None) or {}
    plan = {f"{model.base_model_prefix}.{pattern}": style for pattern, style in base.items()} | dict(head)
    unknown = sorted({style for style in plan.values() if style not in _STYLES})
    rules = [
        SplitRule(match=pattern, kind=_STYLES[style][0], gather_output=_STYLES[style][1])
        for pattern, style in plan.items()
        if style in _STYLES
    ]
    return rules, unknown


def _llama(config: Any, model: Any, length: int) -> Family:
    """Llama, Qwen 2 and 3, Mistral: the model's own plans, and what these leave out (embedding, norms)."""
    own, unknown = translate_plan(model)
    assert not unknown, f"{config.model_type} has tensor-parallel styles that Weft does not know: {unknown}"
    embedding, layers, norm = (f"model.{name}" for name in _pipeline_order(config))
    rules = (
        SplitRule(match=embedding, kind="vocab"),
        # The head is read by the vocabulary loss alone, which wants it split.
        SplitRule(match="lm_head", kind="column"),
        *(rule for rule in own if rule.match != "lm_head"),
        SplitRule(match=f"{layers}.*.self_attn", kind="whole"),
        SplitRule(match=f"{layers}.*.self_attn.attention_probability_dropout", kind="heads"),
        SplitRule(match=f"{layers}.*.input_layernorm", kind="sequence"),
        SplitRule(match=f"{layers}.*.post_attention_layernorm", kind="sequence"),
        SplitRule(match=norm, kind="sequence"),
    )
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention_size = head_size * config.num_attention_heads
    kv_size = head_size * config.num_key_value_heads
    projections = 2 * config.hidden_size * (attention_size + kv_size)
    return Family(
        split=rules,
        divisible={
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        },
        cut=CutTable(
            entry=embedding,
            blocks=tuple(f"{layers}.{index}" for index in range(config.num_hidden_layers)),
            tail=(norm, "lm_head"),
        ),
        vocabulary_head="lm_head",
        cost=TransformerCost(
            num_layers=config.num_hidden_layers,
            block_weights=projections + 3 * config.hidden_size * config.intermediate_size,
            attention_size=attention_size,
            head_weights=config.hidden_size * config.vocab_size,
            sequence_length=length,
        ),
    )


def _pipeline_order(config: Any) -> tuple[str, str, str]:
    """Embedding, layers and norm, as the model's own pipeline plan names them in forward order."""
    names = tuple(config.base_model_pp_plan)
    assert len(names) == 3, f"{config.model_type} has an unexpected pipeline plan: {names}"
    return names[0], names[1], names[2]


def _gpt2(config: Any, model: Any, length: int) -> Family:
    """GPT-2 has no plans.  Its query-key-value is one matrix of three blocks, cut each on its own."""
    ffn_size = config.n_inner or 4 * config.hidden_size
    blocks = "transformer.h.*"
    return Family(
        split=(
            SplitRule(match="transformer.wte", kind="vocab"),
            SplitRule(match=f"{blocks}.attn.c_attn", kind="column", blocks=3),
            SplitRule(match=f"{blocks}.attn.attn_dropout", kind="heads"),
            SplitRule(match=f"{blocks}.attn.c_proj", kind="row"),
            SplitRule(match=f"{blocks}.mlp.c_fc", kind="column"),
            SplitRule(match=f"{blocks}.mlp.c_proj", kind="row"),
            SplitRule(match=f"{blocks}.ln_?", kind="sequence"),
            SplitRule(match=f"{blocks}.attn.resid_dropout", kind="sequence"),
            SplitRule(match=f"{blocks}.mlp.dropout", kind="sequence"),
            SplitRule(match="transformer.ln_f", kind="sequence"),
            SplitRule(match="lm_head", kind="column"),
        ),
        localise=(
            Localise(match=f"{blocks}.attn", attribute="split_size"),
            Localise(match=f"{blocks}.attn", attribute="num_heads"),
        ),
        divisible={
            "num_attention_heads": config.num_attention_heads,
            "n_inner": ffn_size,
            "vocab_size": config.vocab_size,
        },
        cut=CutTable(
            entry="transformer.wte",
            stem_zero=("transformer.wpe",),
            stem_skip=("transformer.drop",),
            blocks=tuple(f"transformer.h.{index}" for index in range(config.num_hidden_layers)),
            tail=("transformer.ln_f", "lm_head"),
        ),
        vocabulary_head="lm_head",
        cost=_plain_cost(config, ffn_size, config.hidden_size * config.vocab_size, length),
    )


def _bert(config: Any, model: Any, length: int) -> Family:
    """BERT has no plans.  The whole prediction head is one tail module, for it holds the decoder's bias itself."""
    blocks = "bert.encoder.layer.*"
    size = config.hidden_size
    return Family(
        split=(
            SplitRule(match="bert.embeddings.word_embeddings", kind="vocab"),
            SplitRule(match=f"{blocks}.attention.self", kind="whole"),
            *(SplitRule(match=f"{blocks}.attention.self.{name}", kind="column") for name in ("query", "key", "value")),
            SplitRule(match=f"{blocks}.attention.self.dropout", kind="heads"),
            SplitRule(match=f"{blocks}.attention.output.dense", kind="row"),
            SplitRule(match=f"{blocks}.intermediate.dense", kind="column"),
            SplitRule(match=f"{blocks}.output.dense", kind="row"),
            SplitRule(match=f"{blocks}.output.LayerNorm", kind="sequence"),
            SplitRule(match=f"{blocks}.output.dropout", kind="sequence"),
            SplitRule(match="cls.predictions.decoder", kind="column"),
        ),
        divisible={
            "num_attention_heads": config.num_attention_heads,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        },
        cut=CutTable(
            entry="bert.embeddings.word_embeddings",
            stem_zero=("bert.embeddings.token_type_embeddings", "bert.embeddings.position_embeddings"),
            stem_skip=("bert.embeddings.LayerNorm", "bert.embeddings.dropout"),
            blocks=tuple(f"bert.encoder.layer.{index}" for index in range(config.num_hidden_layers)),
            tail=("cls",),
        ),
        vocabulary_head="cls.predictions.decoder",
        cost=_plain_cost(config, config.intermediate_size, size * (size + config.vocab_size), length),
    )


def _plain_cost(config: Any, ffn_size: int, head_weights: int, length: int) -> TransformerCost:
    """Full attention and two feed-forward matrices."""
    size = config.hidden_size
    return TransformerCost(
        num_layers=config.num_hidden_layers,
        block_weights=4 * size * size + 2 * size * ffn_size,
        attention_size=size,
        head_weights=head_weights,
        sequence_length=length,
    )


def _unknown(config: Any, model: Any, length: int) -> Family:
    """A family without a table: its own tensor plan if all of it translates, and no pipeline cuts.

    A pipeline plan alone does not tell what a forward does between the embedding and the first block (some scale
    there), so Weft does not cut by it.
    """
    rules, unknown = translate_plan(model)
    no_stages, no_tensor = f"Weft has no table for {config.model_type}, which names its blocks", ""
    notes = [f"{no_stages}: no pipeline stages; write a Blueprint to have them."]
    if unknown:
        rules = []
        no_tensor = f"its tensor-parallel plan uses {', '.join(unknown)}, which Weft cannot split"
        notes.append(f"{no_tensor}: no tensor axis.")
    elif not rules:
        no_tensor = "it brings no tensor-parallel plan, and the recipe has no [model.split]"
        notes.append("it brings no tensor-parallel plan: no tensor axis unless [model.split] says how.")
    counts = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    sizes = {name: getattr(config, name, None) for name in counts}
    divisible = {name: size for name, size in sizes.items() if isinstance(size, int)}
    return Family(
        split=rules,
        divisible=divisible if rules else {},
        notes=notes,
        no_stages=no_stages,
        no_tensor=no_tensor,
    )
