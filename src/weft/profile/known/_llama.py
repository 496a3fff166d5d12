"""Dense models after Llama: RMSNorm before, rotary positions, SwiGLU, no biases unless said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.profile._sizes import ModelSizes
from weft.profile.known._table import KnownModel, published

_LLAMA1 = "Touvron et al. 2023, arXiv 2302.13971, table 2"
_LLAMA2 = "Touvron et al. 2023, arXiv 2307.09288; meta-llama config.json"
_CODE = "Rozière et al. 2023, arXiv 2308.12950; codellama config.json"
_LLAMA3 = "Llama Team 2024, arXiv 2407.21783, table 3; meta-llama config.json"
_MISTRAL = "Jiang et al. 2023, arXiv 2310.06825; mistralai config.json"
_QWEN2 = "Yang et al. 2024, arXiv 2407.10671, table 1; Qwen config.json"
_QWEN25 = "Qwen Team 2024, arXiv 2412.15115, table 1; Qwen config.json"
_QWEN3 = "Yang et al. 2025, arXiv 2505.09388, table 1; Qwen config.json"
_NEMOTRON_15B = "Parmar et al. 2024, arXiv 2402.16819, table 1"
_NEMOTRON_340B = "NVIDIA 2024, arXiv 2406.11704, table 1"
_GEMMA = "Gemma Team 2024, arXiv 2403.08295, table 1; google/gemma config.json"
_GEMMA2 = "Gemma Team 2024, arXiv 2408.00118, table 1; google/gemma-2 config.json"
_OTHERS = "config.json of the published weights"

_Entry = tuple[str, KnownModel]


def llama_models() -> dict[str, KnownModel]:
    """Every model of this file."""
    return dict((*_llama(), *_qwen(), *_nemotron(), *_gemma(), *_others()))


def llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, length: int
) -> ModelSizes:
    """A dense model of this kind."""
    return ModelSizes(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=ffn,
        vocabulary_size=vocabulary,
        sequence_length=length,
    )


def _llama() -> Iterator[_Entry]:
    for name, layers, hidden, heads, ffn, parameters in (
        ("7b", 32, 4096, 32, 11008, 6_738_415_616),
        ("13b", 40, 5120, 40, 13824, 13_015_864_320),
        ("30b", 60, 6656, 52, 17920, 32_528_943_616),
        ("65b", 80, 8192, 64, 22016, 65_285_660_672),
    ):
        first = replace(llama(f"llama-{name}", layers, hidden, heads, heads, ffn, 32000, 2048), norm_epsilon=1e-6)
        yield published(first, parameters, _LLAMA1)
        if name in ("7b", "13b"):
            second = llama(f"llama-2-{name}", layers, hidden, heads, heads, ffn, 32000, 4096)
            yield published(second, parameters, _LLAMA2)
    yield published(llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096), 68_976_648_192, _LLAMA2)
    code = replace(llama("codellama-34b", 48, 8192, 64, 8, 22016, 32000, 16384), rotary_base=1e6)
    yield published(code, 33_743_970_304, _CODE)
    for name, layers, hidden, heads, ffn, parameters in (
        ("8b", 32, 4096, 32, 14336, 8_030_261_248),
        ("70b", 80, 8192, 64, 28672, 70_553_706_496),
        ("405b", 126, 16384, 128, 53248, 405_853_388_800),
    ):
        for generation in ("llama-3", "llama-3.1"):
            if (generation, name) != ("llama-3", "405b"):
                # Pre-trained with 8,192 tokens per sample; longer contexts were taught afterwards.
                sizes = llama(f"{generation}-{name}", layers, hidden, heads, 8, ffn, 128_256, 8192)
                yield published(replace(sizes, rotary_base=5e5), parameters, _LLAMA3)
    small = replace(llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128_256, 8192), tied=True, rotary_base=5e5)
    yield published(small, 1_235_814_400, _LLAMA3)
    small = replace(llama("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128_256, 8192), tied=True, rotary_base=5e5)
    yield published(small, 3_212_749_824, _LLAMA3)


def _qwen() -> Iterator[_Entry]:
    for name, layers, hidden, heads, kv_heads, ffn, vocabulary, parameters in (
        ("qwen2-0.5b", 24, 896, 14, 2, 4864, 151_936, 494_032_768),
        ("qwen2-1.5b", 28, 1536, 12, 2, 8960, 151_936, 1_543_714_304),
        ("qwen2-7b", 28, 3584, 28, 4, 18944, 152_064, 7_615_616_512),
        ("qwen2-72b", 80, 8192, 64, 8, 29568, 152_064, 72_706_203_648),
        ("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151_936, 494_032_768),
        ("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151_936, 1_543_714_304),
        ("qwen2.5-3b", 36, 2048, 16, 2, 11008, 151_936, 3_085_938_688),
        ("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152_064, 7_615_616_512),
        ("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152_064, 14_770_033_664),
        ("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152_064, 32_763_876_352),
        ("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152_064, 72_706_203_648),
    ):
        sizes = llama(name, layers, hidden, heads, kv_heads, ffn, vocabulary, 4096)
        source = _QWEN25 if name.startswith("qwen2.5") else _QWEN2
        sizes = replace(sizes, rotary_base=1e6, norm_epsilon=1e-6)
        yield published(replace(sizes, qkv_bias=True, tied=hidden < 3000), parameters, source)
    for name, layers, hidden, heads, ffn, parameters in (
        ("qwen3-0.6b", 28, 1024, 16, 3072, 596_049_920),
        ("qwen3-1.7b", 28, 2048, 16, 6144, 1_720_574_976),
        ("qwen3-4b", 36, 2560, 32, 9728, 4_022_468_096),
        ("qwen3-8b", 36, 4096, 32, 12288, 8_190_735_360),
        ("qwen3-14b", 40, 5120, 40, 17408, 14_768_307_200),
        ("qwen3-32b", 64, 5120, 64, 25600, 32_762_123_264),
    ):
        sizes = replace(llama(name, layers, hidden, heads, 8, ffn, 151_936, 4096), rotary_base=1e6, norm_epsilon=1e-6)
        yield published(replace(sizes, head_size=128, qk_norm="head", tied=hidden < 4096), parameters, _QWEN3)


def _nemotron() -> Iterator[_Entry]:
    for name, layers, hidden, heads, ffn, parameters, source in (
        ("nemotron-4-15b", 32, 6144, 48, 24576, 15.6e9, _NEMOTRON_15B),
        ("nemotron-4-340b", 96, 18432, 96, 73728, 341e9, _NEMOTRON_340B),
    ):
        sizes = llama(name, layers, hidden, heads, 8, ffn, 256_000, 4096)
        yield published(
            replace(sizes, activation="squared_relu", norm="layer", rotary_fraction=0.5), parameters, source
        )


def _gemma() -> Iterator[_Entry]:
    for name, layers, hidden, heads, kv_heads, ffn, parameters in (
        ("gemma-2b", 18, 2048, 8, 1, 16384, 2_506_172_416),
        ("gemma-7b", 28, 3072, 16, 16, 24576, 8_537_680_896),
    ):
        sizes = llama(name, layers, hidden, heads, kv_heads, ffn, 256_000, 8192)
        sizes = replace(sizes, head_size=256, activation="geglu", tied=True, norm_epsilon=1e-6)
        yield published(sizes, parameters, _GEMMA)
    for name, layers, hidden, heads, kv_heads, head_size, ffn, parameters in (
        ("gemma-2-2b", 26, 2304, 8, 4, 256, 9216, 2_614_341_888),
        ("gemma-2-9b", 42, 3584, 16, 8, 256, 14336, 9_241_705_984),
        ("gemma-2-27b", 46, 4608, 32, 16, 128, 36864, 27_227_128_320),
    ):
        sizes = llama(name, layers, hidden, heads, kv_heads, ffn, 256_000, 8192)
        sizes = replace(
            sizes, head_size=head_size, activation="geglu", tied=True, norm_placement="both", norm_epsilon=1e-6
        )
        yield published(replace(sizes, window=4096, full_attention_every=2), parameters, _GEMMA2)


def _others() -> Iterator[_Entry]:
    mistral = llama("mistral-7b", 32, 4096, 32, 8, 14336, 32000, 8192)
    yield published(replace(mistral, window=4096), 7_241_732_096, _MISTRAL)
    yi = replace(llama("yi-34b", 60, 7168, 56, 8, 20480, 64000, 4096), rotary_base=5e6)
    yield published(yi, 34_388_917_248, f"01-ai/Yi-34B, {_OTHERS}")
    phi = llama("phi-3-mini", 32, 3072, 32, 32, 8192, 32064, 4096)
    yield published(phi, 3_821_079_552, f"microsoft/Phi-3-mini-4k-instruct, {_OTHERS}")
    deepseek = replace(llama("deepseek-67b", 95, 8192, 64, 8, 22016, 102_400, 4096), norm_epsilon=1e-6)
    yield published(deepseek, 67.4e9, "DeepSeek-AI 2024, arXiv 2401.02954, table 2")
    internlm = replace(llama("internlm-7b", 32, 4096, 32, 32, 11008, 103_168, 2048), norm_epsilon=1e-6)
    internlm = replace(internlm, qkv_bias=True, output_bias=True)
    yield published(internlm, 7_321_948_160, f"internlm/internlm-7b, {_OTHERS}")
    internlm = replace(llama("internlm2-20b", 48, 6144, 48, 8, 16384, 92_544, 32768), rotary_base=1e6)
    yield published(internlm, 19_861_149_696, f"internlm/internlm2-20b, {_OTHERS}")
