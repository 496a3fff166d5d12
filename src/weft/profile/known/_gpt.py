"""Models after GPT-2 and GPT-3, encoders, and vision transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.profile._sizes import ModelSizes
from weft.profile.known._table import KnownModel, published

_GPT2 = "Radford et al. 2019; openai-community/gpt2 config.json"
_GPT3 = "Brown et al. 2020, arXiv 2005.14165, table 2.1"
_SC21 = "Narayanan et al. 2021, arXiv 2104.04473, table 1"
_MT_NLG = "Smith et al. 2022, arXiv 2201.11990, section 3.1"
_OPT = "Zhang et al. 2022, arXiv 2205.01068, table 1; facebook/opt config.json"
_BLOOM = "BigScience 2022, arXiv 2211.05100, table 3; bigscience/bloom config.json"
_MPT = "MosaicML llm-foundry, scripts/train/yamls/pretrain and mosaicml/mpt config.json"
_NEOX = "Black et al. 2022, arXiv 2204.06745, section 2 and appendix B"
_GPTJ = "EleutherAI/gpt-j-6b config.json"
_PYTHIA = "Biderman et al. 2023, arXiv 2304.01373, table 1"
_FALCON = "Almazrouei et al. 2023, arXiv 2311.16867; tiiuae/falcon config.json"
_PALM = "Chowdhery et al. 2022, arXiv 2204.02311, table 1"
_BERT = "Devlin et al. 2018, arXiv 1810.04805; google-bert config.json"
_VIT = "Dosovitskiy et al. 2020, arXiv 2010.11929, table 1; 1,000 classes"

_Entry = tuple[str, KnownModel]


def gpt_models() -> dict[str, KnownModel]:
    """Every model of this file."""
    return dict((*_gpt2(), *_gpt3(), *_megatron(), *_opt(), *_bloom(), *_mpt(), *_parallel(), *_encoders()))


def gpt(name: str, layers: int, hidden: int, heads: int, *, vocabulary: int = 50257, length: int = 2048) -> ModelSizes:
    """Learned positions, biases everywhere, LayerNorm before, GELU of four times the width, tied, with dropout."""
    return ModelSizes(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=4 * hidden,
        vocabulary_size=vocabulary,
        sequence_length=length,
        activation="gelu",
        norm="layer",
        rotary=False,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        dropout=0.1,
        attention_dropout=0.1,
        learned_positions=length,
        tied=True,
    )


def _gpt2() -> Iterator[_Entry]:
    for name, layers, hidden, heads, parameters in (
        ("gpt2", 12, 768, 12, 124_439_808),
        ("gpt2-medium", 24, 1024, 16, 354_823_168),
        ("gpt2-large", 36, 1280, 20, 774_030_080),
        ("gpt2-xl", 48, 1600, 25, 1_557_611_200),
    ):
        yield published(gpt(name, layers, hidden, heads, length=1024), parameters, _GPT2)


def _gpt3() -> Iterator[_Entry]:
    for name, layers, hidden, heads, head_size, parameters in (
        ("gpt3-125m", 12, 768, 12, 64, 125e6),
        ("gpt3-350m", 24, 1024, 16, 64, 350e6),
        ("gpt3-760m", 24, 1536, 16, 96, 760e6),
        ("gpt3-1.3b", 24, 2048, 16, 128, 1.3e9),  # the table says 24 heads, which would make it 1.5e9
        ("gpt3-2.7b", 32, 2560, 32, 80, 2.7e9),
        ("gpt3-6.7b", 32, 4096, 32, 128, 6.7e9),
        ("gpt3-13b", 40, 5140, 40, 128, 13e9),
        ("gpt3-175b", 96, 12288, 96, 128, 175e9),
    ):
        sizes = gpt(name, layers, hidden, heads if hidden % heads == 0 else 1)
        yield published(replace(sizes, num_heads=heads, head_size=head_size), parameters, _GPT3)


def _megatron() -> Iterator[_Entry]:
    for name, layers, hidden, heads, parameters in (
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
    ):
        yield published(gpt(name, layers, hidden, heads, vocabulary=51200), parameters, _SC21)
    yield published(gpt("mt-nlg-530b", 105, 20480, 128), 530e9, _MT_NLG)


def _opt() -> Iterator[_Entry]:
    for name, layers, hidden, heads, parameters in (
        ("opt-125m", 12, 768, 12, 125_239_296),
        ("opt-1.3b", 24, 2048, 32, 1_315_758_080),
        ("opt-2.7b", 32, 2560, 32, 2_651_596_800),
        ("opt-6.7b", 32, 4096, 32, 6_658_473_984),
        ("opt-13b", 40, 5120, 40, 12_853_473_280),
        ("opt-30b", 48, 7168, 56, 29_974_540_288),
        ("opt-66b", 64, 9216, 72, 66e9),
        ("opt-175b", 96, 12288, 96, 175e9),
    ):
        # Its table of positions has two rows that no token uses.
        sizes = replace(gpt(name, layers, hidden, heads, vocabulary=50272), activation="relu", learned_positions=2050)
        yield published(sizes, parameters, _OPT)


def _bloom() -> Iterator[_Entry]:
    for name, layers, hidden, heads, parameters in (
        ("bloom-560m", 24, 1024, 16, 559_214_592),
        ("bloom-7b1", 30, 4096, 32, 7_069_016_064),
        ("bloom-176b", 70, 14336, 112, 176_247_271_424),
    ):
        sizes = gpt(name, layers, hidden, heads, vocabulary=250_880)
        sizes = replace(sizes, learned_positions=0, stem_norm=True, dropout=0.0, attention_dropout=0.0)
        yield published(sizes, parameters, _BLOOM)


def _mpt() -> Iterator[_Entry]:
    for name, layers, hidden, heads, length, parameters in (
        ("mpt-125m", 12, 768, 12, 2048, 125e6),
        ("mpt-350m", 24, 1024, 16, 2048, 355e6),
        ("mpt-760m", 24, 1536, 12, 2048, 760e6),
        ("mpt-1b", 24, 2048, 16, 2048, 1.3e9),
        ("mpt-3b", 32, 2560, 20, 2048, 2.65e9),
        ("mpt-7b", 32, 4096, 32, 2048, 6_649_286_656),
        ("mpt-13b", 40, 5120, 40, 2048, 12.85e9),
        ("mpt-30b", 48, 7168, 56, 8192, 29.96e9),
        ("mpt-70b", 80, 8192, 64, 2048, 64.86e9),
    ):
        sizes = gpt(name, layers, hidden, heads, vocabulary=50432, length=length)
        sizes = replace(
            sizes,
            learned_positions=0,
            qkv_bias=False,
            output_bias=False,
            ffn_bias=False,
            norm_bias=False,
            dropout=0.0,
            attention_dropout=0.0,
        )
        yield published(sizes, parameters, _MPT)


def _parallel() -> Iterator[_Entry]:
    """Attention and feed-forward side by side."""
    base = gpt("", 1, 64, 1)
    plain = replace(base, learned_positions=0, rotary=True, tied=False, dropout=0.0, attention_dropout=0.0)
    two = replace(plain, norm_placement="parallel_two", rotary_fraction=0.25)
    yield published(_resized(two, "gpt-neox-20b", 44, 6144, 64, 50432), 20_554_567_680, _NEOX)
    yield published(_resized(two, "pythia-12b", 36, 5120, 40, 50688), 11_846_072_320, _PYTHIA)
    yield published(_resized(two, "pythia-6.9b", 32, 4096, 32, 50432), 6_857_302_016, _PYTHIA)
    one = replace(plain, norm_placement="parallel", qkv_bias=False, output_bias=False)
    gptj = replace(_resized(one, "gpt-j-6b", 28, 4096, 16, 50400), head_bias=True, rotary_fraction=0.25)
    yield published(gptj, 6_050_882_784, _GPTJ)
    bare = replace(one, ffn_bias=False, tied=True)
    falcon = replace(_resized(bare, "falcon-7b", 32, 4544, 71, 65024), num_kv_heads=1)
    yield published(falcon, 6_921_720_704, _FALCON)
    falcon = replace(_resized(bare, "falcon-40b", 60, 8192, 128, 65024), norm_placement="parallel_two", num_kv_heads=8)
    yield published(falcon, 41.3e9, _FALCON)
    falcon = replace(_resized(bare, "falcon-180b", 80, 14848, 232, 65024), norm_placement="parallel_two")
    yield published(replace(falcon, num_kv_heads=8), 180e9, _FALCON)
    palm = replace(bare, activation="swiglu", norm_bias=False, num_kv_heads=1, head_size=256)
    for name, layers, hidden, heads, parameters in (
        ("palm-8b", 32, 4096, 16, 8.63e9),
        ("palm-62b", 64, 8192, 32, 62.50e9),
        ("palm-540b", 118, 18432, 48, 540.35e9),
    ):
        yield published(_resized(palm, name, layers, hidden, heads, 256_000), parameters, _PALM)


def _resized(sizes: ModelSizes, name: str, layers: int, hidden: int, heads: int, vocabulary: int) -> ModelSizes:
    return replace(
        sizes,
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        ffn_size=4 * hidden,
        vocabulary_size=vocabulary,
    )


def _encoders() -> Iterator[_Entry]:
    for name, layers, hidden, heads, parameters in (
        ("bert-base", 12, 768, 12, 109_514_298),
        ("bert-large", 24, 1024, 16, 335_174_458),
    ):
        sizes = gpt(name, layers, hidden, heads, vocabulary=30522, length=512)
        sizes = replace(
            sizes, causal=False, norm_placement="after", token_types=2, stem_norm=True, head="masked", head_bias=True
        )
        yield published(sizes, parameters, _BERT)
    for name, layers, hidden, heads, patch, parameters in (
        ("vit-b-16", 12, 768, 12, 16, 86_567_656),
        ("vit-l-16", 24, 1024, 16, 16, 304_326_632),
        ("vit-h-14", 32, 1280, 16, 14, 632_045_800),
    ):
        tokens = (224 // patch) ** 2 + 1
        sizes = gpt(name, layers, hidden, heads, length=tokens)
        sizes = replace(
            sizes,
            vocabulary_size=0,
            causal=False,
            tied=False,
            dropout=0.0,
            attention_dropout=0.0,
            patch_values=3 * patch * patch,
            class_token=True,
            head="classes",
            num_classes=1000,
            head_bias=True,
        )
        yield published(sizes, parameters, _VIT)
