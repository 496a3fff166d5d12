"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.profile._sizes import ModelSizes
from weft.profile.known._llama import llama
from weft.profile.known._table import KnownModel, published

_MIXTRAL = "Jiang et al. 2024, arXiv 2401.04088; mistralai/Mixtral config.json"
_QWEN3 = "Yang et al. 2025, arXiv 2505.09388, table 2; Qwen config.json"
_QWEN2 = "Yang et al. 2024, arXiv 2407.10671, table 1; Qwen config.json"
_DEEPSEEK2 = "DeepSeek-AI 2024, arXiv 2405.04434, section 3.1; deepseek-ai config.json"
_DEEPSEEK3 = "DeepSeek-AI 2024, arXiv 2412.19437, section 4.2, without the multi-token prediction module"
_KIMI = "Kimi Team 2025, arXiv 2507.20534, table 2; moonshotai/Kimi-K2-Base config.json"
_GPT_OSS = "OpenAI 2025, arXiv 2508.10925, table 1; openai/gpt-oss config.json"
_DBRX = "databricks/dbrx-base config.json"
_GROK = "xai-org/grok-1 config"
_LLAMA4 = "meta-llama/Llama-4 config.json, the text model"
_OWN = "Weft's own example: a mixture of 10^12 parameters with sizes that divide by powers of two"

_Entry = tuple[str, KnownModel]


def mixture_models() -> dict[str, KnownModel]:
    """Every model of this file."""
    return dict((*_plain(), *_qwen(), *_deepseek(), *_gpt_oss(), *_llama4()))


def mixture(base: ModelSizes, experts: int, top_k: int, width: int, *, shared: int = 0, dense: int = 0) -> ModelSizes:
    """The same model with routed experts, and shared ones of `shared` width in all, behind `dense` dense layers."""
    return replace(
        base,
        num_experts=experts,
        top_k=top_k,
        expert_ffn_size=width,
        shared_ffn_size=shared,
        leading_dense_layers=dense,
    )


def _plain() -> Iterator[_Entry]:
    base = replace(llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 4096), rotary_base=1e6)
    yield published(mixture(base, 8, 2, 14336), 46_702_792_704, _MIXTRAL)
    base = replace(llama("mixtral-8x22b", 56, 6144, 48, 8, 16384, 32768, 4096), rotary_base=1e6)
    yield published(mixture(base, 8, 2, 16384), 140_630_071_296, _MIXTRAL)
    base = replace(llama("dbrx", 40, 6144, 48, 8, 10752, 100_352, 4096), norm="layer", norm_bias=False)
    base = replace(base, rotary_base=5e5)
    yield published(mixture(base, 16, 4, 10752), 131_596_523_520, _DBRX)
    base = replace(llama("grok-1", 64, 6144, 48, 8, 32768, 131_072, 8192), activation="geglu", norm_placement="both")
    yield published(mixture(replace(base, tied=True), 8, 2, 32768), 314e9, _GROK)
    base = llama("moe-1t", 64, 8192, 64, 8, 5120, 131_072, 8192)
    yield published(mixture(base, 128, 8, 5120), 1.04e12, _OWN)


def _qwen() -> Iterator[_Entry]:
    base = replace(llama("qwen2-57b-a14b", 28, 3584, 28, 4, 18944, 151_936, 4096), qkv_bias=True)
    base = replace(base, rotary_base=1e6, norm_epsilon=1e-6)
    sizes = replace(mixture(base, 64, 8, 2560, shared=20480), shared_gate=True)
    yield published(sizes, 57.4e9, _QWEN2)
    for name, layers, hidden, heads, width, parameters in (
        ("qwen3-30b-a3b", 48, 2048, 32, 768, 30_532_122_624),
        ("qwen3-235b-a22b", 94, 4096, 64, 1536, 235_093_634_560),
    ):
        base = replace(llama(name, layers, hidden, heads, 4, 3 * hidden, 151_936, 4096), head_size=128, qk_norm="head")
        base = replace(base, rotary_base=1e6, norm_epsilon=1e-6)
        yield published(mixture(base, 128, 8, width), parameters, _QWEN3)


def _latent(name: str, layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, query_rank: int) -> ModelSizes:
    return replace(
        llama(name, layers, hidden, heads, heads, ffn, vocabulary, 4096),
        query_rank=query_rank,
        kv_rank=512,
        rope_head_size=64,
        head_size=192,
        value_head_size=128,
        norm_epsilon=1e-6,
    )


def _deepseek() -> Iterator[_Entry]:
    base = _latent("deepseek-v2-lite", 27, 2048, 16, 10944, 102_400, 0)
    yield published(mixture(base, 64, 6, 1408, shared=2816, dense=1), 15_706_484_224, _DEEPSEEK2)
    base = _latent("deepseek-v2", 60, 5120, 128, 12288, 102_400, 1536)
    yield published(mixture(base, 160, 6, 1536, shared=3072, dense=1), 235_741_434_880, _DEEPSEEK2)
    base = replace(_latent("deepseek-v3", 61, 7168, 128, 18432, 129_280, 1536), router_bias=True)
    yield published(mixture(base, 256, 8, 2048, shared=2048, dense=3), 671_026_419_200, _DEEPSEEK3)
    base = replace(_latent("kimi-k2", 61, 7168, 64, 18432, 163_840, 1536), router_bias=True, rotary_base=5e4)
    yield published(mixture(base, 384, 8, 2048, shared=2048, dense=1), 1.03e12, _KIMI)


def _gpt_oss() -> Iterator[_Entry]:
    for name, layers, experts, parameters in (
        ("gpt-oss-20b", 24, 32, 20_914_757_184),
        ("gpt-oss-120b", 36, 128, 116_829_156_672),
    ):
        base = llama(name, layers, 2880, 64, 8, 2880, 201_088, 4096)
        base = replace(
            base,
            head_size=64,
            qkv_bias=True,
            output_bias=True,
            ffn_bias=True,
            router_bias=True,
            attention_sinks=True,
            window=128,
            full_attention_every=2,
            rotary_base=150_000.0,
        )
        yield published(mixture(base, experts, 4, 2880), parameters, _GPT_OSS)


def _llama4() -> Iterator[_Entry]:
    base = replace(llama("llama-4-scout", 48, 5120, 40, 8, 16384, 202_048, 8192), rotary_base=5e5)
    yield published(mixture(base, 16, 1, 8192, shared=8192), 107.8e9, _LLAMA4)
    base = replace(llama("llama-4-maverick", 48, 5120, 40, 8, 16384, 202_048, 8192), rotary_base=5e5)
    sizes = replace(mixture(base, 128, 1, 8192, shared=8192), expert_every=2)
    yield published(sizes, 400.0e9, _LLAMA4)
