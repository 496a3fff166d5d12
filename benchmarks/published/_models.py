"""The model that a row describes: its sizes, completed from its name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.published._rows import Run
from benchmarks.published._sources import history_of, year_of
from benchmarks.published._unpredictable import Unpredictable
from weft.errors import RecipeError
from weft.model.profile import ModelSizes, Profile, profile_of_sizes
from weft.model.profile.known import KNOWN_MODELS

_GPT_VOCABULARY = 51200
"""GPT-2's 50,257 padded to a multiple of 128 × 8, Megatron's usual."""
_BERT_VOCABULARY = 30592

_NOT_PART_OF_NAME = re.compile(r"[-_ ](?:lora|sft|peft|instruct|base|hf|tokendrop|pretrain)\b.*")
_ADAPTERS = re.compile(r"lora|peft|adapter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What a family of models has in common besides its sizes."""

    pattern: str
    vocabulary: int
    traits: dict[str, Any] = field(default_factory=dict[str, Any])


_GPT_TRAITS = {
    "activation": "gelu",
    "norm": "layer",
    "qkv_bias": True,
    "output_bias": True,
    "ffn_bias": True,
    "rotary": False,
    "tied": True,
}
_STYLES = (
    Style(
        pattern=r"bert",
        vocabulary=_BERT_VOCABULARY,
        traits={**_GPT_TRAITS, "causal": False, "head": "masked", "dropout": 0.1, "attention_dropout": 0.1},
    ),
    Style(
        pattern=r"mpt",
        vocabulary=50368,
        traits={"activation": "gelu", "norm": "layer", "norm_bias": False, "rotary": False, "tied": True},
    ),
    Style(
        pattern=r"nemotron",
        vocabulary=256000,
        traits={"activation": "squared_relu", "norm": "layer", "rotary": True},
    ),
    Style(pattern=r"opt\b|opt-", vocabulary=50272, traits={**_GPT_TRAITS, "activation": "relu"}),
    Style(pattern=r"bloom", vocabulary=250880, traits={**_GPT_TRAITS, "stem_norm": True}),
    Style(
        pattern=r"neox|pythia",
        vocabulary=50432,
        traits={**_GPT_TRAITS, "rotary": True, "tied": False, "norm_placement": "parallel_two"},
    ),
    Style(
        pattern=r"falcon",
        vocabulary=65024,
        traits={"activation": "gelu", "norm": "layer", "norm_placement": "parallel", "tied": True},
    ),
    Style(pattern=r"gpt-oss", vocabulary=201088, traits={"activation": "swiglu"}),
    Style(
        pattern=r"palm", vocabulary=256000, traits={"activation": "swiglu", "norm_placement": "parallel", "tied": True}
    ),
    Style(pattern=r"gemma", vocabulary=256000, traits={"activation": "geglu", "tied": True}),
    Style(
        pattern=r"gpt|turing|nlg|megatron|jurassic|chinchilla|gopher", vocabulary=_GPT_VOCABULARY, traits=_GPT_TRAITS
    ),
    Style(pattern=r"llama-?3|llama_?3|llama 3", vocabulary=128256),
    Style(pattern=r"qwen", vocabulary=151936),
    Style(pattern=r"deepseek", vocabulary=129280),
    Style(pattern=r"internlm", vocabulary=103168),
    Style(pattern=r"llama|mistral|mixtral|yi-|vicuna|olmo|baichuan|grok|dbrx|phi|glm", vocabulary=32000),
)


def trains_adapters_only(run: Run) -> bool:
    """Whether the base weights are frozen."""
    return bool(_ADAPTERS.search(run.model.lower()))


def profile_of_run(run: Run) -> Profile:
    """Return what the row's model computes.

    Raises:
        Unpredictable: sizes are missing and the name is not known, or make no model.
    """
    try:
        return profile_of_sizes(sizes_of_run(run))
    except RecipeError as error:
        raise Unpredictable(f"its sizes make no model: {error}") from None


def sizes_of_run(run: Run) -> ModelSizes:
    """Return the sizes that the row gives, completed by a known model of the same name or by the family's style.

    Raises:
        Unpredictable: sizes are missing and the name is not known.
        RecipeError: the sizes contradict one another.
    """
    known = _known(run)
    if known is not None and (run.hidden in (None, known.hidden_size)):
        return _overridden(known, run)
    if run.layers is None or run.hidden is None or run.heads is None:
        raise Unpredictable(f'the sizes of "{run.model}" are not given, and no model of that name is known')
    return _styled(run, run.layers, run.hidden, run.heads)


def _known(run: Run) -> ModelSizes | None:
    """Return the known model of the row's name, or the LLaMA of its size where its authors call theirs like it."""
    name = _NOT_PART_OF_NAME.sub("", run.model.lower())
    plain = _letters(name)
    wanted = {plain, plain.replace("llama3", "llama31", 1)}
    alike = re.search(r"llama[^b]*-like-(\d+b)", name)
    if alike and run.hidden is None:
        wanted.add(f"llama2{alike.group(1)}")
    for title, model in KNOWN_MODELS.items():
        if _letters(title) in wanted:
            return model.sizes
    return None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower()).replace(".", "")


def _overridden(known: ModelSizes, run: Run) -> ModelSizes:
    """The known model with what the row says otherwise."""
    length = run.sequence_length or known.sequence_length
    changes: dict[str, Any] = {
        "num_layers": run.layers,
        "num_heads": run.heads,
        "num_kv_heads": run.kv_heads,
        "vocabulary_size": run.vocabulary,
        ("expert_ffn_size" if known.num_experts else "ffn_size"): run.ffn,
        "num_experts": run.experts,
        "top_k": run.top_k if run.experts else None,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    sizes = replace(known, sequence_length=length, **given)
    return replace(sizes, learned_positions=max(length, 1)) if sizes.learned_positions else sizes


def _styled(run: Run, layers: int, hidden: int, heads: int) -> ModelSizes:
    """Sizes of a model that only the row knows, in the style of its name or else of its numbers."""
    length = run.sequence_length
    if length is None:
        raise Unpredictable("seq_len is empty, and the model is not known by name")
    style = _style(run)
    single_layer = layers == 1 and run.vocabulary is None
    traits = dict(style.traits)
    if traits.get("rotary") is False and "mpt" not in style.pattern and not single_layer:
        traits["learned_positions"] = length
    if traits.get("tied") and style.traits is _GPT_TRAITS and not _is_fused_loss_era(run):
        traits |= {"dropout": 0.1, "attention_dropout": 0.1}
    ffn = run.ffn or _usual_ffn(hidden, gated="activation" not in traits or traits["activation"] in ("swiglu", "geglu"))
    if run.experts:
        traits |= {"num_experts": run.experts, "top_k": run.top_k or 1, "expert_ffn_size": ffn}
    else:
        traits |= {"ffn_size": ffn}
    if single_layer:
        traits |= {"head": "none", "vocabulary_size": 0, "tied": False}
    else:
        traits |= {"vocabulary_size": run.vocabulary or style.vocabulary}
    return _tied_as_counted(
        run,
        ModelSizes(
            name=run.model,
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=run.kv_heads,
            sequence_length=length,
            **traits,
        ),
    )


def _tied_as_counted(run: Run, sizes: ModelSizes) -> ModelSizes:
    """Tie or untie embedding and head, where the number of parameters that the row gives says so clearly."""
    if run.parameters_billion is None or not sizes.vocabulary_size:
        return sizes
    other = replace(sizes, tied=not sizes.tied)
    stated = run.parameters_billion * 1e9
    distance, other_distance = (abs(profile_of_sizes(one).num_parameters - stated) for one in (sizes, other))
    embedding = sizes.vocabulary_size * sizes.hidden_size
    return other if distance - other_distance > 0.5 * embedding else sizes


def _is_fused_loss_era(run: Run) -> bool:
    """Whether dropout has gone out of use: from 2024 on recipes set it to 0."""
    return year_of(run) >= 2024 or history_of(run).name in ("llm-foundry",)


def _usual_ffn(hidden: int, *, gated: bool) -> int:
    """Inner width where the row gives none: 4 h, or 8/3 h rounded up to 256 for gated ones."""
    return -(-8 * hidden // 3 // 256) * 256 if gated else 4 * hidden


def _style(run: Run) -> Style:
    name = run.model.lower()
    for style in _STYLES:
        if re.search(style.pattern, name):
            return style
    plain = Style(pattern="", vocabulary=run.vocabulary or _GPT_VOCABULARY, traits=_GPT_TRAITS)
    gated = Style(pattern="", vocabulary=run.vocabulary or 32000)
    if run.ffn and run.hidden:
        return plain if run.ffn == 4 * run.hidden and (run.kv_heads in (None, run.heads)) else gated
    return gated
