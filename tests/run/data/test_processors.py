"""What a model's own tokenizer, image processor and feature extractor do is what its data go through."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from model_folders import (
    save_classifier,
    save_listener,
    save_tokenizer,
    save_translator,
    save_vision,
    write_rows,
    write_wave,
)
from saved_datasets import classes, picture, recipe_of, save_dataset, value, write_images

from weft.analysis.blueprint import build_blueprint
from weft.config.recipe import ModelRecipe
from weft.errors import DataError
from weft.run.data import PreparedData, data_shape
from weft.run.data.preparation import prepare_data

TEXTS = [("good film", "good"), ("a very very bad film", "bad"), ("not bad", "good")]


def prepared(train: Path, folder: Path, length: int | None = None, **data: Any) -> PreparedData:
    recipe = recipe_of(train, model=ModelRecipe(hf=str(folder), sequence_length=length), **data)
    return prepare_data(recipe, data_shape(build_blueprint(recipe), recipe))


def values_of(data: PreparedData, count: int) -> dict[str, np.ndarray[Any, Any]]:
    return data.train.sets[0].open().read(np.arange(count), np.arange(count))


def test_texts_are_what_the_tokenizer_gives(tmp_path: Path) -> None:
    tokenizer = save_classifier(tmp_path / "model", types=True, num_labels=2)
    rows = [{"text": text, "label": label} for text, label in TEXTS]
    data = prepared(write_rows(tmp_path / "train.jsonl", rows), tmp_path / "model", 6)
    values = values_of(data, 3)
    expected = tokenizer(
        [text for text, _ in TEXTS], padding="max_length", truncation=True, max_length=6, return_tensors="np"
    )
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert (values[name] == expected[name]).all(), name
    assert values["labels"].tolist() == [1, 0, 1]
    (line,) = data.description
    assert "2 classes: bad = 0, good = 1" in line
    assert "input_ids by" in line
    assert "longer texts are cut at their end (1 of the first 3)" in line


def test_pairs_of_texts(tmp_path: Path) -> None:
    tokenizer = save_classifier(tmp_path / "model", types=True, num_labels=2)
    rows = [{"premise": "good film", "claim": "not a bad film", "label": 1}]
    columns = {"text": "premise", "text_pair": "claim"}
    data = prepared(write_rows(tmp_path / "train.jsonl", rows), tmp_path / "model", 12, columns=columns)
    values = values_of(data, 1)
    expected = tokenizer("good film", "not a bad film", padding="max_length", max_length=12, return_tensors="np")
    assert 1 in values["token_type_ids"]
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert (values[name] == expected[name]).all(), name


def test_tokens_that_are_there_already_are_filled_up(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model", num_labels=2)
    rows = [{"input_ids": [2, 5, 3], "label": 0}, {"input_ids": [2, 3], "attention_mask": [1, 0], "label": 1}]
    values = values_of(prepared(write_rows(tmp_path / "train.jsonl", rows), tmp_path / "model", 4), 2)
    assert values["input_ids"].tolist() == [[2, 5, 3, 0], [2, 3, 0, 0]]
    assert values["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_pairs_of_a_translation(tmp_path: Path) -> None:
    tokenizer = save_translator(tmp_path / "model")
    rows = [{"en": "one two", "es": "uno dos"}, {"en": "three", "es": "tres uno dos tres tres"}]
    columns = {"text": "en", "target": "es"}
    data = prepared(write_rows(tmp_path / "train.jsonl", rows), tmp_path / "model", 5, columns=columns)
    values = values_of(data, 2)
    first = tokenizer(text_target="uno dos").input_ids
    assert values["labels"].tolist()[0] == [*first, *[-100] * (5 - len(first))]
    assert values["labels"].tolist()[1] == tokenizer(text_target=rows[1]["es"]).input_ids[:5]
    assert values["decoder_input_ids"].tolist()[0] == [0, *first, *[0] * (4 - len(first))]
    assert values["attention_mask"].sum(1).tolist() == [4, 3]


def test_images_are_what_the_processor_gives(tmp_path: Path) -> None:
    processor = save_vision(tmp_path / "model", num_labels=2)
    folder = write_images(tmp_path / "images", {"cat": 2, "dog": 2})
    data = prepared(folder, tmp_path / "model")
    values = values_of(data, 4)
    expected = processor(images=[picture(at) for at in range(4)], return_tensors="np")["pixel_values"]
    assert (values["pixel_values"] == expected).all()
    assert values["pixel_values"].min() < 0
    assert "pixel_values by ViTImageProcessor" in data.description[0]


def test_a_processor_of_another_size(tmp_path: Path) -> None:
    save_vision(tmp_path / "model", size=24, num_labels=2)
    folder = write_images(tmp_path / "images", {"cat": 1, "dog": 1})
    with pytest.raises(DataError, match=r"000.png.*makes 3 × 24 × 24 of it: change `size` in preprocessor_config.json"):
        prepared(folder, tmp_path / "model")


def test_sounds_are_what_the_extractor_gives(tmp_path: Path) -> None:
    extractor = save_listener(tmp_path / "model", num_labels=2)
    draws = np.random.default_rng(4)
    waves = [draws.uniform(-0.5, 0.5, count) for count in (800, 500)]
    for at, values in enumerate(waves):
        write_wave(tmp_path / f"{at}.wav", values)
    rows = [{"audio": f"{at}.wav", "label": name} for at, name in enumerate(("yes", "no"))]
    data = prepared(write_rows(tmp_path / "train.jsonl", rows), tmp_path / "model", 800)
    results = values_of(data, 2)
    read = [(values * 32767).astype("<i2").astype(np.float32) / 32768 for values in waves]
    settings = {"sampling_rate": 8000, "padding": "max_length", "max_length": 800, "return_tensors": "np"}
    for at in (0, 1):
        assert (results["input_values"][at] == extractor([read[at]], **settings)["input_values"][0]).all()
    assert results["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("rate", "count", "message"),
    [
        (
            16000,
            500,
            r"0.wav' as its audio \(16,000 values a second, and Wav2Vec2FeatureExtractor takes 8,000. R",
        ),
        (8000, 900, "900 values of sound, more than the 800 that it takes. Cut it"),
    ],
)
def test_sounds_of_another_rate_or_too_long(tmp_path: Path, rate: int, count: int, message: str) -> None:
    save_listener(tmp_path / "model", num_labels=2)
    write_wave(tmp_path / "0.wav", np.zeros(count), rate)
    path = write_rows(tmp_path / "train.jsonl", [{"audio": "0.wav", "label": 0}])
    with pytest.raises(DataError, match=message):
        prepared(path, tmp_path / "model", 800)


def test_a_file_that_is_no_sound(tmp_path: Path) -> None:
    save_listener(tmp_path / "model", num_labels=2)
    path = write_rows(tmp_path / "train.jsonl", [{"audio": "0.wav", "label": 0}])
    (tmp_path / "0.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"train.jsonl:1 has '0.wav' as its audio \(it is no WAV that can be read"):
        prepared(path, tmp_path / "model", 800)


def test_what_the_processor_does_belongs_to_the_data(tmp_path: Path) -> None:
    """Where the folder lies does not matter; what is in its files does."""
    folder = write_images(tmp_path / "images", {"cat": 1, "dog": 1})
    save_vision(tmp_path / "one", num_labels=2)
    save_vision(tmp_path / "two", num_labels=2)
    one, two = prepared(folder, tmp_path / "one"), prepared(folder, tmp_path / "two")
    assert one.fingerprint == two.fingerprint
    file = tmp_path / "two" / "preprocessor_config.json"
    file.write_text(file.read_text().replace("0.25", "0.75"))
    assert prepared(folder, tmp_path / "two").fingerprint != one.fingerprint
    again = PreparedData.from_json(one.to_json())
    assert all((values_of(again, 2)[name] == values).all() for name, values in values_of(one, 2).items())


def test_threads_share_a_tokenizer(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model", num_labels=2)
    rows = [{"text": " ".join(["good"] * (1 + at % 12)), "label": at % 2} for at in range(64)]
    data = prepared(write_rows(tmp_path / "train.jsonl", rows), tmp_path / "model", 10)
    samples = data.train.sets[0].open()
    expected = samples.read(np.arange(64), np.arange(64))
    wrong: list[int] = []

    def read(start: int) -> None:
        for at in range(start, 64, 8):
            values = samples.read(np.array([at]), np.array([at]))
            wrong.extend(at for name in expected if (values[name][0] != expected[name][at]).any())

    threads = [threading.Thread(target=read, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("preprocessor_config.json", "[1]", "preprocessor_config.json"),
        ("preprocessor_config.json", '{"image_processor_type": "NoneSuch"}', "cannot load the ImageProcessor"),
    ],
)
def test_a_broken_processor_is_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    save_vision(tmp_path / "model", num_labels=2)
    (tmp_path / "model" / file).write_text(content)
    folder = write_images(tmp_path / "images", {"cat": 1, "dog": 1})
    with pytest.raises(Exception, match=message) as raised:
        prepared(folder, tmp_path / "model")
    assert type(raised.value).__name__ in ("DataError", "RecipeError")


def test_code_of_the_folder_does_not_run(tmp_path: Path) -> None:
    save_vision(tmp_path / "model", num_labels=2)
    (tmp_path / "model" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    text = '{"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}}'
    (tmp_path / "model" / "preprocessor_config.json").write_text(text)
    folder = write_images(tmp_path / "images", {"cat": 1, "dog": 1})
    with pytest.raises(DataError, match="cannot load the ImageProcessor"):
        prepared(folder, tmp_path / "model")
    assert not (tmp_path / "ran").exists()


def test_a_column_of_no_use_is_refused(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model", num_labels=2)
    path = write_rows(tmp_path / "train.jsonl", [{"review": "good", "label": 0}])
    with pytest.raises(DataError, match="data.columns names txt, which is not looked for in rows. Did you mean text?"):
        prepared(path, tmp_path / "model", 8, columns={"txt": "review"})
    with pytest.raises(DataError, match=r"train.jsonl:1 has no field input_ids or text \(it has review, label\)"):
        prepared(path, tmp_path / "model", 8)
    assert prepared(path, tmp_path / "model", 8, columns={"text": "review"})


def test_a_tokenizer_alone_gives_masks_to_what_is_made_up(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model", num_labels=2)
    recipe = recipe_of("synthetic", model=ModelRecipe(hf=str(tmp_path / "model"), sequence_length=8))
    data = prepare_data(recipe, data_shape(build_blueprint(recipe), recipe))
    masks = values_of(data, 50)["attention_mask"]
    assert (masks[:, 0] == 1).all()
    assert (np.diff(masks, axis=1) <= 0).all()
    assert len(set(masks.sum(1).tolist())) > 3


def test_a_corpus_is_cut_by_the_models_tokenizer(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    tokenizer = save_tokenizer(tmp_path / "model")
    texts = ["one two three", "uno dos tres good film"]
    path = write_rows(tmp_path / "train.jsonl", [{"text": text} for text in texts])
    data = prepared(path, tmp_path / "model", 4, cache=str(tmp_path / "cache"))
    ids = [*tokenizer(texts[0], add_special_tokens=False).input_ids, tokenizer.sep_token_id]
    assert values_of(data, 1)["tokens"].tolist() == [ids]
    other = save_tokenizer(tmp_path / "other").backend_tokenizer
    other.add_tokens(["four"])
    other.save(str(tmp_path / "tokenizer.json"))
    named = prepared(
        path, tmp_path / "model", 4, cache=str(tmp_path / "cache"), tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert named.tokenizer != data.tokenizer


def test_tags_of_words_stand_at_their_first_tokens(tmp_path: Path) -> None:
    save_classifier(
        tmp_path / "model", id2label={0: "O", 1: "FILM", 2: "JUDGED"}, label2id={"O": 0, "FILM": 1, "JUDGED": 2}
    )
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("ForSequenceClassification", "ForTokenClassification"))
    rows: list[dict[str, Any]] = [
        {"text": ["a", "good-bad", "film"], "tags": ["O", "JUDGED", "FILM"]},
        {"text": ["film"], "tags": [1]},
    ]
    path = write_rows(tmp_path / "train.jsonl", rows)
    values = values_of(prepared(path, tmp_path / "model", 8), 2)
    assert values["labels"].tolist() == [[-100, 0, 2, -100, -100, 1, -100, -100], [-100, 1, *[-100] * 6]]
    assert values["attention_mask"].sum(1).tolist() == [7, 3]
    rows[0]["tags"] = ["O"]
    with pytest.raises(DataError, match=r"train.jsonl:1 has .*\(3 words, and 1 tags"):
        prepared(write_rows(path, rows), tmp_path / "model", 8)
    rows[0]["tags"] = ["O", "JUDGE", "FILM"]
    with pytest.raises(DataError, match="Did you mean JUDGED?"):
        prepared(write_rows(path, rows), tmp_path / "model", 8)


def test_captions_say_the_next_token(tmp_path: Path) -> None:
    save_vision(tmp_path / "model")
    text: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"intermediate_size": 16, "encoder_hidden_size": 16, "projection_dim": 16, "max_position_embeddings": 16}
    vision: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
    vision |= {"intermediate_size": 16, "patch_size": 8}
    config = transformers.BlipConfig(text_config=text, vision_config=vision)
    config.architectures = ["BlipForConditionalGeneration"]
    config.save_pretrained(tmp_path / "model")
    tokenizer = save_tokenizer(tmp_path / "model")
    picture(0).save(tmp_path / "0.png")
    path = write_rows(tmp_path / "train.jsonl", [{"image": "0.png", "text": "a good film"}])
    values = values_of(prepared(path, tmp_path / "model", 8), 1)
    ids = tokenizer("a good film").input_ids
    assert values["input_ids"].tolist() == [[*ids, 0, 0, 0]]
    assert values["labels"].tolist() == [[*ids[1:], -100, -100, -100, -100]]
    assert values["attention_mask"].tolist() == [[1] * 5 + [0] * 3]


def test_sounds_in_a_folder_per_class(tmp_path: Path) -> None:
    save_listener(tmp_path / "model", num_labels=2)
    for number, name in enumerate(("yes", "no", "yes")):
        (tmp_path / "sounds" / name).mkdir(parents=True, exist_ok=True)
        write_wave(tmp_path / "sounds" / name / f"{number}.wav", np.full(500, number / 10))
    data = prepared(tmp_path / "sounds", tmp_path / "model", 600)
    assert "3 samples" in data.description[0]
    assert "2 classes: no = 0, yes = 1" in data.description[0]
    assert values_of(data, 3)["labels"].tolist() == [0, 1, 1]
    picture(0).save(tmp_path / "sounds" / "no" / "0.png")
    with pytest.raises(DataError, match=r"no/0.png has no field input_values or audio"):
        prepared(tmp_path / "sounds", tmp_path / "model", 600)


def test_an_extractor_that_draws_is_refused(tmp_path: Path) -> None:
    save_listener(tmp_path / "model", num_labels=2)
    file = tmp_path / "model" / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"do_normalize"', '"dither": 0.1,\n  "do_normalize"'))
    with pytest.raises(DataError, match="adds random numbers to sounds"):
        prepared(tmp_path / "sounds", tmp_path / "model", 600)


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    save_vision(tmp_path / "model", num_labels=2)
    write_images(tmp_path / "images", {"cat": 1})
    with pytest.raises(DataError, match="image does not exist .*Did you mean images?"):
        prepared(tmp_path / "image", tmp_path / "model")


@pytest.mark.parametrize("order", [("O", "FILM", "JUDGED"), ("JUDGED", "O", "FILM")])
def test_declared_tags_are_numbered_by_the_model(tmp_path: Path, order: tuple[str, ...]) -> None:
    names = ("O", "FILM", "JUDGED")
    numbers = {name: number for number, name in enumerate(names)}
    save_classifier(tmp_path / "model", id2label=dict(enumerate(names)), label2id=numbers)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("ForSequenceClassification", "ForTokenClassification"))
    columns = {"text": [["good", "film"], ["a", "film"]], "ner": [[order.index("JUDGED"), order.index("FILM")], [0, 0]]}
    features = {
        "text": {"feature": value("string"), "_type": "List"},
        "ner": {"feature": classes(*order), "_type": "List"},
    }
    folder = save_dataset(tmp_path / "set", columns, features)
    data = prepared(folder, tmp_path / "model", 5, columns={"tags": "ner"})
    assert values_of(data, 1)["labels"].tolist() == [[-100, 2, 1, -100, -100]]
