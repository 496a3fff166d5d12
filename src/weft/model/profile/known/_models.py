"""Published models, series by series: what they have in common, and a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.model.profile.known._table import KnownModel, joined, series

_OTHERS = "config.json of the published weights"
_MISTRAL = "Jiang et al. 2023, arXiv 2310.06825; mistralai config.json"
_CODE = "Rozière et al. 2023, arXiv 2308.12950; codellama config.json"
_PHI3 = f"microsoft/Phi-3-mini-4k-instruct, {_OTHERS}"
_DEEPSEEK = "DeepSeek-AI 2024, arXiv 2401.02954, table 2"
_INTERNLM2 = f"internlm/internlm2-20b, {_OTHERS}"

# ── after GPT-2 and GPT-3: learned positions, biases everywhere, LayerNorm before, GELU, tied, with dropout ───────────


def _four_times(sizes: Mapping[str, Any]) -> int:
    return 4 * sizes["hidden_size"]


def _every_position(sizes: Mapping[str, Any]) -> int:
    return sizes["sequence_length"]


_GPT: Mapping[str, Any] = {
    "vocabulary_size": 50257,
    "sequence_length": 2048,
    "ffn_size": _four_times,
    "learned_positions": _every_position,
    "activation": "gelu",
    "norm": "layer",
    "rotary": False,
    "qkv_bias": True,
    "output_bias": True,
    "ffn_bias": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "tied": True,
}
_KEEPING = {**_GPT, "dropout": 0.0, "attention_dropout": 0.0}
_SHAPE = "num_layers hidden_size num_heads"

_GPTS = (
    series(
        "Radford et al. 2019; openai-community/gpt2 config.json",
        {**_GPT, "sequence_length": 1024},
        _SHAPE,
        ("gpt2", 12, 768, 12, 124_439_808),
        ("gpt2-medium", 24, 1024, 16, 354_823_168),
        ("gpt2-large", 36, 1280, 20, 774_030_080),
        ("gpt2-xl", 48, 1600, 25, 1_557_611_200),
    ),
    series(
        "Brown et al. 2020, arXiv 2005.14165, table 2.1",
        _GPT,
        f"{_SHAPE} head_size",
        ("gpt3-125m", 12, 768, 12, 64, 125e6),
        ("gpt3-350m", 24, 1024, 16, 64, 350e6),
        ("gpt3-760m", 24, 1536, 16, 96, 760e6),
        ("gpt3-1.3b", 24, 2048, 16, 128, 1.3e9),  # the table says 24 heads, which would make it 1.5e9
        ("gpt3-2.7b", 32, 2560, 32, 80, 2.7e9),
        ("gpt3-6.7b", 32, 4096, 32, 128, 6.7e9),
        ("gpt3-13b", 40, 5140, 40, 128, 13e9),
        ("gpt3-175b", 96, 12288, 96, 128, 175e9),
    ),
    series(
        "Narayanan et al. 2021, arXiv 2104.04473, table 1",
        {**_GPT, "vocabulary_size": 51200},
        _SHAPE,
        ("megatron-1.7b", 24, 2304, 24, 1.7e9),
        ("megatron-3.6b", 30, 3072, 32, 3.6e9),
        ("megatron-7.5b", 36, 4096, 32, 7.5e9),
        ("megatron-18b", 40, 6144, 48, 18.4e9),
        ("megatron-39b", 48, 8192, 64, 39.1e9),
        ("megatron-76b", 60, 10240, 80, 76.1e9),
        ("megatron-145b", 80, 12288, 96, 145.6e9),
        ("megatron-310b", 96, 16384, 128, 310.1e9),
        ("megatron-530b", 105, 20480, 128, 529.6e9),
        ("megatron-1t", 128, 25600, 160, 1008.0e9),
    ),
    series("Smith et al. 2022, arXiv 2201.11990, section 3.1", _GPT, _SHAPE, ("mt-nlg-530b", 105, 20480, 128, 530e9)),
    series(
        "Zhang et al. 2022, arXiv 2205.01068, table 1; facebook/opt config.json",
        # Its table of positions has two rows that no token uses.
        {**_GPT, "vocabulary_size": 50272, "activation": "relu", "learned_positions": 2050},
        _SHAPE,
        ("opt-125m", 12, 768, 12, 125_239_296),
        ("opt-1.3b", 24, 2048, 32, 1_315_758_080),
        ("opt-2.7b", 32, 2560, 32, 2_651_596_800),
        ("opt-6.7b", 32, 4096, 32, 6_658_473_984),
        ("opt-13b", 40, 5120, 40, 12_853_473_280),
        ("opt-30b", 48, 7168, 56, 29_974_540_288),
        ("opt-66b", 64, 9216, 72, 66e9),
        ("opt-175b", 96, 12288, 96, 175e9),
    ),
    series(
        "BigScience 2022, arXiv 2211.05100, table 3; bigscience/bloom config.json",
        {**_KEEPING, "vocabulary_size": 250_880, "learned_positions": 0, "stem_norm": True},
        _SHAPE,
        ("bloom-560m", 24, 1024, 16, 559_214_592),
        ("bloom-7b1", 30, 4096, 32, 7_069_016_064),
        ("bloom-176b", 70, 14336, 112, 176_247_271_424),
    ),
    series(
        "MosaicML llm-foundry, scripts/train/yamls/pretrain and mosaicml/mpt config.json",
        {
            **_KEEPING,
            "vocabulary_size": 50432,
            "learned_positions": 0,
            **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias", "norm_bias"), False),
        },
        f"{_SHAPE} sequence_length",
        ("mpt-125m", 12, 768, 12, 2048, 125e6),
        ("mpt-350m", 24, 1024, 16, 2048, 355e6),
        ("mpt-760m", 24, 1536, 12, 2048, 760e6),
        ("mpt-1b", 24, 2048, 16, 2048, 1.3e9),
        ("mpt-3b", 32, 2560, 20, 2048, 2.65e9),
        ("mpt-7b", 32, 4096, 32, 2048, 6_649_286_656),
        ("mpt-13b", 40, 5120, 40, 2048, 12.85e9),
        ("mpt-30b", 48, 7168, 56, 8192, 29.96e9),
        ("mpt-70b", 80, 8192, 64, 2048, 64.86e9),
    ),
)

# ── attention and feed-forward side by side ───────────────────────────────────────────────────────────────────────────

_SIDE_BY_SIDE = {**_KEEPING, "learned_positions": 0, "rotary": True, "tied": False}
_NEOX = {**_SIDE_BY_SIDE, "norm_placement": "parallel_two", "rotary_fraction": 0.25}
_ONE_NORM = {**_SIDE_BY_SIDE, "norm_placement": "parallel", "qkv_bias": False, "output_bias": False}
_BARE = {**_ONE_NORM, "ffn_bias": False, "tied": True}
_FALCON = "Almazrouei et al. 2023, arXiv 2311.16867; tiiuae/falcon config.json"

_PARALLEL = (
    series(
        "Black et al. 2022, arXiv 2204.06745, section 2 and appendix B",
        {**_NEOX, "vocabulary_size": 50432},
        _SHAPE,
        ("gpt-neox-20b", 44, 6144, 64, 20_554_567_680),
    ),
    series(
        "Biderman et al. 2023, arXiv 2304.01373, table 1",
        _NEOX,
        f"{_SHAPE} vocabulary_size",
        ("pythia-12b", 36, 5120, 40, 50688, 11_846_072_320),
        ("pythia-6.9b", 32, 4096, 32, 50432, 6_857_302_016),
    ),
    series(
        "EleutherAI/gpt-j-6b config.json",
        {**_ONE_NORM, "vocabulary_size": 50400, "head_bias": True, "rotary_fraction": 0.25},
        _SHAPE,
        ("gpt-j-6b", 28, 4096, 16, 6_050_882_784),
    ),
    series(
        _FALCON,
        {**_BARE, "vocabulary_size": 65024},
        f"{_SHAPE} num_kv_heads norm_placement",
        ("falcon-7b", 32, 4544, 71, 1, "parallel", 6_921_720_704),
        ("falcon-40b", 60, 8192, 128, 8, "parallel_two", 41.3e9),
        ("falcon-180b", 80, 14848, 232, 8, "parallel_two", 180e9),
    ),
    series(
        "Chowdhery et al. 2022, arXiv 2204.02311, table 1",
        {
            **_BARE,
            "vocabulary_size": 256_000,
            "activation": "swiglu",
            "norm_bias": False,
            "num_kv_heads": 1,
            "head_size": 256,
        },
        _SHAPE,
        ("palm-8b", 32, 4096, 16, 8.63e9),
        ("palm-62b", 64, 8192, 32, 62.50e9),
        ("palm-540b", 118, 18432, 48, 540.35e9),
    ),
)

# ── encoders, and vision transformers ─────────────────────────────────────────────────────────────────────────────────

_ENCODERS = (
    series(
        "Devlin et al. 2018, arXiv 1810.04805; google-bert config.json",
        {
            **_GPT,
            "vocabulary_size": 30522,
            "sequence_length": 512,
            "causal": False,
            "norm_placement": "after",
            "token_types": 2,
            "stem_norm": True,
            "head": "masked",
            "head_bias": True,
        },
        _SHAPE,
        ("bert-base", 12, 768, 12, 109_514_298),
        ("bert-large", 24, 1024, 16, 335_174_458),
    ),
    series(
        "Dosovitskiy et al. 2020, arXiv 2010.11929, table 1; 1,000 classes",
        {
            **_KEEPING,
            "vocabulary_size": 0,
            "causal": False,
            "tied": False,
            "class_token": True,
            "head": "classes",
            "num_classes": 1000,
            "head_bias": True,
        },
        f"{_SHAPE} sequence_length patch_values",
        ("vit-b-16", 12, 768, 12, (224 // 16) ** 2 + 1, 3 * 16**2, 86_567_656),
        ("vit-l-16", 24, 1024, 16, (224 // 16) ** 2 + 1, 3 * 16**2, 304_326_632),
        ("vit-h-14", 32, 1280, 16, (224 // 14) ** 2 + 1, 3 * 14**2, 632_045_800),
    ),
)

# ── after Llama: RMSNorm before, rotary positions, SwiGLU, no biases unless said ──────────────────────────────────────

_GROUPED = f"{_SHAPE} num_kv_heads ffn_size"
_LLAMA3: Mapping[str, Any] = {"vocabulary_size": 128_256, "sequence_length": 8192, "rotary_base": 5e5}
"""Pre-trained with 8,192 tokens per sample; longer contexts were taught afterwards."""
_LLAMA3_SOURCE = "Llama Team 2024, arXiv 2407.21783, table 3; meta-llama config.json"
_QWEN: Mapping[str, Any] = {"sequence_length": 4096, "rotary_base": 1e6, "norm_epsilon": 1e-6}
_QWEN2 = {**_QWEN, "qkv_bias": True}
_QWEN2_SOURCE = "Yang et al. 2024, arXiv 2407.10671, table 1; Qwen config.json"
_QWEN3 = {**_QWEN, "vocabulary_size": 151_936, "head_size": 128, "qk_norm": "head"}
_GEMMA: Mapping[str, Any] = {
    "vocabulary_size": 256_000,
    "sequence_length": 8192,
    "activation": "geglu",
    "tied": True,
    "norm_epsilon": 1e-6,
}
_NEMOTRON: Mapping[str, Any] = {
    "vocabulary_size": 256_000,
    "sequence_length": 4096,
    "activation": "squared_relu",
    "norm": "layer",
    "rotary_fraction": 0.5,
}

_LLAMAS = (
    series(
        "Touvron et al. 2023, arXiv 2302.13971, table 2",
        {"vocabulary_size": 32000, "sequence_length": 2048, "norm_epsilon": 1e-6},
        _GROUPED,
        ("llama-7b", 32, 4096, 32, 32, 11008, 6_738_415_616),
        ("llama-13b", 40, 5120, 40, 40, 13824, 13_015_864_320),
        ("llama-30b", 60, 6656, 52, 52, 17920, 32_528_943_616),
        ("llama-65b", 80, 8192, 64, 64, 22016, 65_285_660_672),
    ),
    series(
        "Touvron et al. 2023, arXiv 2307.09288; meta-llama config.json",
        {"vocabulary_size": 32000, "sequence_length": 4096},
        _GROUPED,
        ("llama-2-7b", 32, 4096, 32, 32, 11008, 6_738_415_616),
        ("llama-2-13b", 40, 5120, 40, 40, 13824, 13_015_864_320),
        ("llama-2-70b", 80, 8192, 64, 8, 28672, 68_976_648_192),
    ),
    series(
        _LLAMA3_SOURCE,
        _LLAMA3,
        _GROUPED,
        ("llama-3-8b", 32, 4096, 32, 8, 14336, 8_030_261_248),
        ("llama-3.1-8b", 32, 4096, 32, 8, 14336, 8_030_261_248),
        ("llama-3-70b", 80, 8192, 64, 8, 28672, 70_553_706_496),
        ("llama-3.1-70b", 80, 8192, 64, 8, 28672, 70_553_706_496),
        ("llama-3.1-405b", 126, 16384, 128, 8, 53248, 405_853_388_800),
    ),
    series(
        _LLAMA3_SOURCE,
        {**_LLAMA3, "tied": True},
        _GROUPED,
        ("llama-3.2-1b", 16, 2048, 32, 8, 8192, 1_235_814_400),
        ("llama-3.2-3b", 28, 3072, 24, 8, 8192, 3_212_749_824),
    ),
    series(
        _QWEN2_SOURCE,
        _QWEN2,
        f"{_GROUPED} vocabulary_size tied",
        ("qwen2-0.5b", 24, 896, 14, 2, 4864, 151_936, True, 494_032_768),
        ("qwen2-1.5b", 28, 1536, 12, 2, 8960, 151_936, True, 1_543_714_304),
        ("qwen2-7b", 28, 3584, 28, 4, 18944, 152_064, False, 7_615_616_512),
        ("qwen2-72b", 80, 8192, 64, 8, 29568, 152_064, False, 72_706_203_648),
    ),
    series(
        "Qwen Team 2024, arXiv 2412.15115, table 1; Qwen config.json",
        _QWEN2,
        f"{_GROUPED} vocabulary_size tied",
        ("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151_936, True, 494_032_768),
        ("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151_936, True, 1_543_714_304),
        ("qwen2.5-3b", 36, 2048, 16, 2, 11008, 151_936, True, 3_085_938_688),
        ("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152_064, False, 7_615_616_512),
        ("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152_064, False, 14_770_033_664),
        ("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152_064, False, 32_763_876_352),
        ("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152_064, False, 72_706_203_648),
    ),
    series(
        "Yang et al. 2025, arXiv 2505.09388, table 1; Qwen config.json",
        _QWEN3,
        f"{_GROUPED} tied",
        ("qwen3-0.6b", 28, 1024, 16, 8, 3072, True, 596_049_920),
        ("qwen3-1.7b", 28, 2048, 16, 8, 6144, True, 1_720_574_976),
        ("qwen3-4b", 36, 2560, 32, 8, 9728, True, 4_022_468_096),
        ("qwen3-8b", 36, 4096, 32, 8, 12288, False, 8_190_735_360),
        ("qwen3-14b", 40, 5120, 40, 8, 17408, False, 14_768_307_200),
        ("qwen3-32b", 64, 5120, 64, 8, 25600, False, 32_762_123_264),
    ),
    series(
        "Parmar et al. 2024, arXiv 2402.16819, table 1",
        _NEMOTRON,
        _GROUPED,
        ("nemotron-4-15b", 32, 6144, 48, 8, 24576, 15.6e9),
    ),
    series(
        "NVIDIA 2024, arXiv 2406.11704, table 1",
        _NEMOTRON,
        _GROUPED,
        ("nemotron-4-340b", 96, 18432, 96, 8, 73728, 341e9),
    ),
    series(
        "Gemma Team 2024, arXiv 2403.08295, table 1; google/gemma config.json",
        {**_GEMMA, "head_size": 256},
        _GROUPED,
        ("gemma-2b", 18, 2048, 8, 1, 16384, 2_506_172_416),
        ("gemma-7b", 28, 3072, 16, 16, 24576, 8_537_680_896),
    ),
    series(
        "Gemma Team 2024, arXiv 2408.00118, table 1; google/gemma-2 config.json",
        {**_GEMMA, "norm_placement": "both", "window": 4096, "full_attention_every": 2},
        f"{_GROUPED} head_size",
        ("gemma-2-2b", 26, 2304, 8, 4, 9216, 256, 2_614_341_888),
        ("gemma-2-9b", 42, 3584, 16, 8, 14336, 256, 9_241_705_984),
        ("gemma-2-27b", 46, 4608, 32, 16, 36864, 128, 27_227_128_320),
    ),
    series(
        "",
        {"vocabulary_size": 32000},
        f"{_GROUPED} sequence_length window rotary_base source",
        ("mistral-7b", 32, 4096, 32, 8, 14336, 8192, 4096, 1e4, _MISTRAL, 7_241_732_096),
        ("codellama-34b", 48, 8192, 64, 8, 22016, 16384, None, 1e6, _CODE, 33_743_970_304),
    ),
    series(
        "",
        {},
        f"{_GROUPED} vocabulary_size sequence_length rotary_base norm_epsilon source",
        ("yi-34b", 60, 7168, 56, 8, 20480, 64000, 4096, 5e6, 1e-5, f"01-ai/Yi-34B, {_OTHERS}", 34_388_917_248),
        ("phi-3-mini", 32, 3072, 32, 32, 8192, 32064, 4096, 1e4, 1e-5, _PHI3, 3_821_079_552),
        ("deepseek-67b", 95, 8192, 64, 8, 22016, 102_400, 4096, 1e4, 1e-6, _DEEPSEEK, 67.4e9),
        ("internlm2-20b", 48, 6144, 48, 8, 16384, 92_544, 32768, 1e6, 1e-5, _INTERNLM2, 19_861_149_696),
    ),
    series(
        f"internlm/internlm-7b, {_OTHERS}",
        {
            "vocabulary_size": 103_168,
            "sequence_length": 2048,
            "norm_epsilon": 1e-6,
            "qkv_bias": True,
            "output_bias": True,
        },
        _GROUPED,
        ("internlm-7b", 32, 4096, 32, 32, 11008, 7_321_948_160),
    ),
)

# ── mixtures of experts ───────────────────────────────────────────────────────────────────────────────────────────────

_EXPERTS = f"{_GROUPED} num_experts top_k expert_ffn_size"
_SHARED = f"{_EXPERTS} shared_ffn_size"
_LATENT: Mapping[str, Any] = {
    "sequence_length": 4096,
    "kv_rank": 512,
    "rope_head_size": 64,
    "head_size": 192,
    "value_head_size": 128,
    "norm_epsilon": 1e-6,
}
_DEEPSEEK2 = "DeepSeek-AI 2024, arXiv 2405.04434, section 3.1; deepseek-ai config.json"
_DEEPSEEK3 = "DeepSeek-AI 2024, arXiv 2412.19437, section 4.2, without the multi-token prediction module"
_KIMI = "Kimi Team 2025, arXiv 2507.20534, table 2; moonshotai/Kimi-K2-Base config.json"

_LONG: Mapping[str, Any] = {"vocabulary_size": 131_072, "sequence_length": 8192}

_MIXTURES = (
    series(
        "Jiang et al. 2024, arXiv 2401.04088; mistralai/Mixtral config.json",
        {"sequence_length": 4096, "rotary_base": 1e6},
        f"{_EXPERTS} vocabulary_size",
        ("mixtral-8x7b", 32, 4096, 32, 8, 14336, 8, 2, 14336, 32000, 46_702_792_704),
        ("mixtral-8x22b", 56, 6144, 48, 8, 16384, 8, 2, 16384, 32768, 140_630_071_296),
    ),
    series(
        "databricks/dbrx-base config.json",
        {
            "vocabulary_size": 100_352,
            "sequence_length": 4096,
            "norm": "layer",
            "norm_bias": False,
            "rotary_base": 5e5,
        },
        _EXPERTS,
        ("dbrx", 40, 6144, 48, 8, 10752, 16, 4, 10752, 131_596_523_520),
    ),
    series(
        "xai-org/grok-1 config",
        {**_LONG, "activation": "geglu", "norm_placement": "both", "tied": True},
        _EXPERTS,
        ("grok-1", 64, 6144, 48, 8, 32768, 8, 2, 32768, 314e9),
    ),
    series(
        "Weft's own example: a mixture of 10^12 parameters with sizes that divide by powers of two",
        _LONG,
        _EXPERTS,
        ("moe-1t", 64, 8192, 64, 8, 5120, 128, 8, 5120, 1.04e12),
    ),
    series(
        _QWEN2_SOURCE,
        {**_QWEN, "vocabulary_size": 151_936, "qkv_bias": True, "shared_gate": True},
        _SHARED,
        ("qwen2-57b-a14b", 28, 3584, 28, 4, 18944, 64, 8, 2560, 20480, 57.4e9),
    ),
    series(
        "Yang et al. 2025, arXiv 2505.09388, table 2; Qwen config.json",
        _QWEN3,
        _EXPERTS,
        ("qwen3-30b-a3b", 48, 2048, 32, 4, 3 * 2048, 128, 8, 768, 30_532_122_624),
        ("qwen3-235b-a22b", 94, 4096, 64, 4, 3 * 4096, 128, 8, 1536, 235_093_634_560),
    ),
    series(
        "",
        _LATENT,
        f"{_SHARED} vocabulary_size query_rank leading_dense_layers source",
        ("deepseek-v2-lite", 27, 2048, 16, 16, 10944, 64, 6, 1408, 2816, 102_400, 0, 1, _DEEPSEEK2, 15_706_484_224),
        ("deepseek-v2", 60, 5120, 128, 128, 12288, 160, 6, 1536, 3072, 102_400, 1536, 1, _DEEPSEEK2, 235_741_434_880),
    ),
    series(
        "",
        {**_LATENT, "query_rank": 1536, "router_bias": True},
        f"{_SHARED} vocabulary_size leading_dense_layers rotary_base source",
        ("deepseek-v3", 61, 7168, 128, 128, 18432, 256, 8, 2048, 2048, 129_280, 3, 1e4, _DEEPSEEK3, 671_026_419_200),
        ("kimi-k2", 61, 7168, 64, 64, 18432, 384, 8, 2048, 2048, 163_840, 1, 5e4, _KIMI, 1.03e12),
    ),
    series(
        "OpenAI 2025, arXiv 2508.10925, table 1; openai/gpt-oss config.json",
        {
            "vocabulary_size": 201_088,
            "sequence_length": 4096,
            "head_size": 64,
            **dict.fromkeys(("qkv_bias", "output_bias", "ffn_bias", "router_bias", "attention_sinks"), True),
            "window": 128,
            "full_attention_every": 2,
            "rotary_base": 150_000.0,
        },
        _EXPERTS,
        ("gpt-oss-20b", 24, 2880, 64, 8, 2880, 32, 4, 2880, 20_914_757_184),
        ("gpt-oss-120b", 36, 2880, 64, 8, 2880, 128, 4, 2880, 116_829_156_672),
    ),
    series(
        "meta-llama/Llama-4 config.json, the text model",
        {"vocabulary_size": 202_048, "sequence_length": 8192, "rotary_base": 5e5},
        f"{_SHARED} expert_every",
        ("llama-4-scout", 48, 5120, 40, 8, 16384, 16, 1, 8192, 8192, 1, 107.8e9),
        ("llama-4-maverick", 48, 5120, 40, 8, 16384, 128, 1, 8192, 8192, 2, 400.0e9),
    ),
)

KNOWN_MODELS: Mapping[str, KnownModel] = joined(*_GPTS, *_PARALLEL, *_ENCODERS, *_LLAMAS, *_MIXTURES)
"""Well-known models by their public names in lower case: `llama-3.1-405b`, `deepseek-v3`, `gpt3-175b`."""
