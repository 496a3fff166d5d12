"""Small folders of models of `transformers` with their tokenizer or processor, and data that they take."""

from __future__ import annotations

import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ("good", "bad", "film", "very", "one", "two", "three", "uno", "dos", "tres", "not", "a")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def save_tokenizer(folder: Path, *, types: bool = False) -> Any:
    """A tokenizer of whole words, which marks both ends of a text; return it as the folder gives it."""
    import transformers

    words = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", words["[CLS]"]), ("[SEP]", words["[SEP]"])],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    if types:
        names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]  # type: ignore[assignment]
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def save_classifier(folder: Path, *, types: bool = False, **settings: Any) -> Any:
    """A BERT that classifies texts, and its tokenizer."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        architectures=["BertForSequenceClassification"],
        **settings,
    )
    config.save_pretrained(folder)
    return save_tokenizer(folder, types=types)


def save_vision(folder: Path, *, size: int = 16, **settings: Any) -> Any:
    """A ViT of 16 × 16 pixels that classifies images, and its processor."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=8,
        architectures=["ViTForImageClassification"],
        **settings,
    )
    config.save_pretrained(folder)
    written = {
        "image_processor_type": "ViTImageProcessor",
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.5, 0.25, 0.5],
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": size, "width": size},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")


def save_listener(folder: Path, **settings: Any) -> Any:
    """A Wav2Vec2 that classifies sounds, and its feature extractor."""
    import transformers

    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        mask_time_prob=0.0,
        architectures=["Wav2Vec2ForSequenceClassification"],
        **settings,
    )
    config.save_pretrained(folder)
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000)
    extractor.save_pretrained(folder)
    return extractor


def save_translator(folder: Path) -> Any:
    """A T5, and its tokenizer."""
    import transformers

    config = transformers.T5Config(
        vocab_size=len(SPECIAL) + len(WORDS),
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    return save_tokenizer(folder)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def write_wave(path: Path, values: np.ndarray[Any, Any], rate: int = 8000) -> Path:
    """16 bits of one channel of values in [−1, 1)."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((values * 32767).astype("<i2").tobytes())
    return path
