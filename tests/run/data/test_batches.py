"""What a data rank gets: packed and isolated documents, masked tokens, images, and an exact validation set."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.config.plan import MicrobatchPlan
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    DecoderShape,
    MlpShape,
    ModelRecipe,
    Recipe,
    RunRecipe,
)
from weft.errors import DataError
from weft.model.blueprint import Blueprint
from weft.model.losses import regression_loss, token_loss
from weft.run.data import DataShape, PreparedData, data_shape, open_data
from weft.run.data._corpus import TokenStream
from weft.run.data._fields import check_finite
from weft.run.data._image_samples import ImageSamples
from weft.run.data._reader import TrainReader
from weft.run.data._tokens import StreamWindows, TokenSamples, TokenTask, document_borders, mask_tokens
from weft.run.data.preparation import load_tokenizer, prepare, prepare_data

LENGTH = 32
TEXT = DataShape(task="causal_lm", sequence_length=LENGTH, vocabulary_size=300)
PIECES = 7  # separator in hand-made streams


def recipe(*sources: str | tuple[str, float], batch: int = 12, seed: int = 1, **data: Any) -> Recipe:
    pairs = [source if isinstance(source, tuple) else (source, 1.0) for source in sources]
    train = tuple(DataSource(source=name, weight=weight) for name, weight in pairs)
    settings: dict[str, Any] = {"prefetch_workers": 0, **data}
    shape = DecoderShape(num_layers=1, hidden_size=16, num_heads=2)
    return Recipe(
        model=ModelRecipe(reference="decoder", shape=shape),
        data=DataRecipe(train=train, **settings),
        batch=BatchRecipe(global_batch_size=batch),
        run=RunRecipe(steps=10, seed=seed),
    )


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of many short documents, and a cache."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, count in (("a", 900), ("b", 500)):
        lines = [json.dumps({"text": f"{name}{number}: " + name * (number % 23)}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def text_recipe(corpora: Path, *names: str, **data: Any) -> Recipe:
    sources = [str(corpora / f"{name}.jsonl") for name in names or ("a",)]
    return recipe(*sources, cache=str(corpora / "cache"), validation_fraction=0.1, **data)


def stream_of(*documents: int) -> TokenStream:
    """Documents of these lengths, tokens 10, 11, …, each ended by the separator."""
    pieces = [np.r_[np.arange(10, 10 + length), PIECES] for length in documents]
    tokens = np.concatenate(pieces).astype(np.uint16)
    return TokenStream([tokens], np.array([[0, 0, len(tokens)]], np.int64))


def read_all(task: TokenTask, stream: TokenStream, *, keep_tail: bool) -> dict[str, np.ndarray]:
    samples = TokenSamples(StreamWindows(stream, task, keep_tail=keep_tail), task, "test")
    index = np.arange(samples.size)
    return samples.read(index, index)


@given(documents=st.lists(st.integers(1, 40), min_size=3, max_size=20), length=st.integers(1, 24))
def test_packed_samples_are_the_stream_and_predict_it(documents: list[int], length: int) -> None:
    stream = stream_of(*documents)
    task = TokenTask(kind="causal_lm", sequence_length=length, vocabulary_size=60, separator=PIECES)
    whole = stream.read(0, len(stream))
    batch = read_all(task, stream, keep_tail=True)
    labels = batch["labels"][batch["labels"] != -100]
    assert np.array_equal(labels, whole[1:])  # every token but the first is predicted exactly once
    assert np.array_equal(batch["tokens"].ravel()[: len(whole) - 1], whole[:-1])
    if (len(whole) - 1) // length:
        train = read_all(task, stream, keep_tail=False)
        count = (len(whole) - 1) // length * length
        assert np.array_equal(train["tokens"].ravel(), whole[:count])
        assert np.array_equal(train["labels"].ravel(), whole[1 : count + 1])


@given(documents=st.lists(st.integers(1, 40), min_size=3, max_size=20), length=st.integers(1, 24))
def test_isolated_labels_never_cross_a_border(documents: list[int], length: int) -> None:
    stream = stream_of(*documents)
    task = TokenTask(kind="causal_lm", sequence_length=length, vocabulary_size=60, separator=PIECES, isolated=True)
    batch = read_all(task, stream, keep_tail=True)
    for tokens, labels, positions, ids in zip(
        batch["tokens"], batch["labels"], batch["positions"], batch["document_ids"], strict=True
    ):
        expected_id = expected_position = 0
        for place in range(length):
            assert (ids[place], positions[place]) == (expected_id, expected_position)
            if tokens[place] == PIECES:
                assert labels[place] == -100
                expected_id, expected_position = expected_id + 1, 0
            else:
                expected_position += 1
            if labels[place] != -100 and place + 1 < length:
                assert labels[place] == tokens[place + 1]
    ignored_real = sum(documents)  # each content token predicts the next token of its document or its separator
    assert (batch["labels"] != -100).sum() == ignored_real - (0 if documents else 1)


def test_document_borders_of_a_row() -> None:
    positions, ids = document_borders(np.array([[1, 2, PIECES, 3, PIECES, PIECES, 4]]), PIECES)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    assert ids.tolist() == [[0, 0, 0, 1, 1, 2, 3]]


def test_masking_follows_the_rule_and_the_key_alone() -> None:
    task = TokenTask(
        kind="masked_lm", sequence_length=100, vocabulary_size=50, separator=0, mask_token=1, random_tokens=40, seed=3
    )
    tokens = np.tile(np.arange(100) % 38 + 2, (500, 1))
    tokens[:, 50] = 0
    real, ids = np.full(500, 90), np.arange(500)
    shown, labels = mask_tokens(tokens, real, ids, task)
    chosen = labels != -100
    assert np.array_equal(labels[chosen], tokens[chosen])
    assert np.array_equal(shown[~chosen], tokens[~chosen])
    assert not chosen[:, 50].any()
    assert not chosen[:, 90:].any()
    count = 500 * 89
    assert abs(chosen.sum() / count - 0.15) < 4 * math.sqrt(0.15 * 0.85 / count)
    masked, kept = (shown == 1)[chosen].mean(), (shown == tokens)[chosen].mean()
    assert abs(masked - 0.8) < 0.02
    assert abs(kept - 0.1) < 0.02
    again = mask_tokens(tokens[7:9], real[7:9], ids[7:9], task)
    assert np.array_equal(again[0], shown[7:9])
    assert np.array_equal(again[1], labels[7:9])
    other = mask_tokens(tokens, real, ids + 500, task)
    assert (chosen != (other[1] != -100)).any()


@pytest.mark.parametrize("documents", ["packed", "isolated"])
@pytest.mark.parametrize("shares", [(6,), (3, 3), (1, 2, 3), (4, 1, 1)])
def test_data_ranks_share_the_batch_of_one_process(corpora: Path, documents: str, shares: tuple[int, ...]) -> None:
    corpus_recipe = text_recipe(corpora, "a", "b", documents=documents)
    prepared = PreparedData.from_json(prepare_data(corpus_recipe, TEXT).to_json())
    one = open_data(corpus_recipe, TEXT, microbatch=MicrobatchPlan(size=12, per_step=1), prepared=prepared)
    many = [
        open_data(
            corpus_recipe,
            TEXT,
            microbatch=MicrobatchPlan(size=2, per_step=shares),
            data_ranks=len(shares),
            data_index=index,
            prepared=prepared,
        )
        for index in range(len(shares))
    ]
    for step in (0, 5, 300):
        (whole,) = one.microbatches(step)
        parts = [rank.microbatches(step) for rank in many]
        assert [len(part) for part in parts] == list(shares)
        for name in whole:
            joined = torch.cat([microbatch[name] for part in parts for microbatch in part])
            assert torch.equal(joined, whole[name]), name
    assert set(whole) == {"tokens", "labels", "sample_ids"} | (
        {"positions", "document_ids"} if documents == "isolated" else set()
    )


@pytest.mark.parametrize("shares", [(6,), (3, 3), (1, 2, 3)])
def test_evaluation_sees_each_label_once_with_equal_calls(corpora: Path, shares: tuple[int, ...]) -> None:
    corpus_recipe = text_recipe(corpora)
    prepared = prepare_data(corpus_recipe, TEXT)
    corpus_stream = prepare(
        [corpus_recipe.data.train[0].source], vocabulary_size=300, cache=corpus_recipe.data.cache
    ).stream("validation", 0.1)
    expected = corpus_stream.read(1, len(corpus_stream))
    lists = []
    for index in range(len(shares)):
        plan = MicrobatchPlan(size=2, per_step=shares)
        source = open_data(
            corpus_recipe, TEXT, microbatch=plan, data_ranks=len(shares), data_index=index, prepared=prepared
        )
        lists.append(list(source.evaluation()))
        assert len(lists[-1]) == source.num_evaluation_steps() == -(-source.validation_size // 12)
        assert source.validation_size % 12
        assert len(list(source.evaluation(2))) == 2
        for step in lists[-1]:
            assert [microbatch["tokens"].shape for microbatch in step] == [(2, LENGTH)] * shares[index]
    labels = torch.cat(
        [microbatch["labels"] for steps in zip(*lists, strict=True) for rank in steps for microbatch in rank]
    )
    assert labels[labels != -100].tolist() == expected.tolist()
    # The sums of an uneven tail are those of one process.
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for steps in lists:
        for step in steps:
            for microbatch in step:
                logits = torch.nn.functional.one_hot(microbatch["tokens"], 300).double()
                part, number = token_loss(logits, microbatch)
                total, count = total + part, count + float(number)
    tokens = torch.from_numpy(corpus_stream.read(0, len(corpus_stream) - 1))
    exact = torch.nn.functional.cross_entropy(
        torch.nn.functional.one_hot(tokens, 300).double(), torch.from_numpy(expected), reduction="sum"
    )
    assert count == len(expected)
    assert abs(float(total - exact)) <= 1e-10 * float(exact)


def test_blend_takes_its_proportions_and_never_validation_documents(corpora: Path) -> None:
    corpus_recipe = text_recipe(corpora, "a", "b")
    sources = tuple(
        replace(source, weight=weight) for source, weight in zip(corpus_recipe.data.train, (3.0, 1.0), strict=True)
    )
    corpus_recipe = replace(corpus_recipe, data=replace(corpus_recipe.data, train=sources))
    reader = TrainReader(prepare_data(corpus_recipe, TEXT).train, 0, 12)
    for step in range(50):
        corpora_of, _, _ = reader.sampler.locate(reader.sampler.sample_ids(step))
        assert np.bincount(corpora_of, minlength=2).tolist() == [9, 3]


def test_masked_language_model_batches(corpora: Path) -> None:
    corpus_recipe = text_recipe(corpora)
    shape = replace(TEXT, task="masked_lm")
    with open_data(corpus_recipe, shape, microbatch=MicrobatchPlan(size=12)) as source:
        (first,), (again,), (later,) = (source.microbatches(step) for step in (0, 0, 1))
        assert torch.equal(first["tokens"], again["tokens"])
        assert not torch.equal(first["labels"] != -100, later["labels"] != -100)
        assert 0.05 < (first["labels"] != -100).float().mean() < 0.3
        evaluated = [torch.cat([m["labels"] for m in step]) for step in source.evaluation()]
        assert all(
            torch.equal(a, torch.cat([m["labels"] for m in b]))
            for a, b in zip(evaluated, source.evaluation(), strict=True)
        )


def test_fingerprint_and_state(corpora: Path) -> None:
    corpus_recipe = text_recipe(corpora)
    plan = MicrobatchPlan(size=12)
    source = open_data(corpus_recipe, TEXT, microbatch=plan)
    state = source.state(7)
    assert source.step_of(json.loads(json.dumps(state))) == 7
    assert open_data(replace(corpus_recipe, run=RunRecipe(steps=5)), TEXT, microbatch=plan).fingerprint != ""
    longer = open_data(corpus_recipe, replace(TEXT, sequence_length=64), microbatch=plan)
    with pytest.raises(DataError, match="samples would not be the same"):
        longer.step_of(state)
    seeded = open_data(replace(corpus_recipe, run=RunRecipe(steps=10, seed=2)), TEXT, microbatch=plan)
    with pytest.raises(DataError, match=r"run\.seed = 1234, but the recipe now says 2|run\.seed = 1, but"):
        seeded.step_of(state)


def test_separate_validation_sources_are_evaluated_whole(corpora: Path) -> None:
    corpus_recipe = text_recipe(corpora)
    corpus_recipe = replace(
        corpus_recipe, data=replace(corpus_recipe.data, validation=(DataSource(source=str(corpora / "b.jsonl")),))
    )
    prepared = prepare_data(corpus_recipe, TEXT)
    source = open_data(corpus_recipe, TEXT, microbatch=MicrobatchPlan(size=12), prepared=prepared)
    labels = sum(int((m["labels"] != -100).sum()) for step in source.evaluation() for m in step)
    corpus = prepare([corpora / "b.jsonl"], vocabulary_size=300, tokenizer=prepared.tokenizer, cache=corpora / "cache")
    assert labels == corpus.num_tokens - 1


def test_no_validation_is_an_error_only_when_asked(corpora: Path) -> None:
    corpus_recipe = text_recipe(corpora)
    corpus_recipe = replace(corpus_recipe, data=replace(corpus_recipe.data, validation_fraction=0.0))
    source = open_data(corpus_recipe, TEXT, microbatch=MicrobatchPlan(size=12))
    assert source.validation_size == source.num_evaluation_steps() == 0
    with pytest.raises(DataError, match="no validation data to evaluate on"):
        next(source.evaluation())


def test_prepared_folders_are_sources_and_must_share_a_tokenizer(corpora: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        prepare([corpora / f"{name}.jsonl"], vocabulary_size=300, folder=tmp_path / name)
    data = open_data(recipe(str(tmp_path / "a")), TEXT, microbatch=MicrobatchPlan(size=12))
    assert data.microbatches(0)[0]["tokens"].shape == (12, LENGTH)
    tokenizer = prepare_data(recipe(str(tmp_path / "a")), TEXT).tokenizer
    assert tokenizer is not None
    assert load_tokenizer(tokenizer).get_vocab_size() <= 300
    with pytest.raises(DataError, match="were prepared with different tokenizers"):
        prepare_data(recipe(str(tmp_path / "a"), str(tmp_path / "b")), TEXT)
    with pytest.raises(DataError, match="tokens, but the model's vocabulary_size is 260"):
        prepare_data(recipe(str(tmp_path / "a")), replace(TEXT, vocabulary_size=260))


def test_token_outside_the_vocabulary_is_named() -> None:
    task = TokenTask(kind="causal_lm", sequence_length=8, vocabulary_size=17, separator=PIECES)
    with pytest.raises(
        DataError, match=r"Sample 1 of test has token 17 at position \d.* Set vocabulary_size to at least"
    ):
        read_all(task, stream_of(5, 12, 3), keep_tail=True)


def test_corpus_shorter_than_a_sample_is_refused() -> None:
    task = TokenTask(kind="causal_lm", sequence_length=512, vocabulary_size=60, separator=PIECES)
    with pytest.raises(DataError, match=r"has 14 tokens, .*sequence_length = 512 needs 513.* to at most 13"):
        read_all(task, stream_of(5, 7), keep_tail=False)


@pytest.mark.parametrize("shape", [(1, 8, 8), (64,)])
def test_digits_have_a_fixed_split(shape: tuple[int, ...]) -> None:
    expected = DataShape(task="classification", image_shape=shape)
    source = open_data(recipe("digits", batch=100), expected, microbatch=MicrobatchPlan(size=50, per_step=2))
    assert source.validation_size == 297
    first = source.microbatches(0)[0]
    assert first["images"].shape == (50, *shape)
    assert first["images"].dtype == torch.float32
    assert float(first["images"].max()) == 1.0
    epoch = torch.cat([m["sample_ids"] for step in range(15) for m in source.microbatches(step)])
    assert sorted(epoch.tolist()) == list(range(1500))
    counted = [m["labels"][m["labels"] != -100] for step in source.evaluation() for m in step]
    assert len(torch.cat(counted)) == 297


def test_digits_that_do_not_fit_are_refused() -> None:
    for shape, match in (
        (DataShape(task="classification", image_shape=(3, 32, 32)), r"1 × 8 × 8 .* takes \(3, 32, 32\)"),
        (DataShape(task="classification", image_shape=(64,), num_classes=3), "num_classes = 3. Set .* = 10"),
        (DataShape(task="regression", image_shape=(64,)), "the model does regression"),
    ):
        with pytest.raises(DataError, match=match):
            prepare_data(recipe("digits"), shape)
    with pytest.raises(DataError, match="digits has images, but the model reads tokens"):
        prepare_data(recipe("digits"), TEXT)
    with pytest.raises(DataError, match="stdlib is text, but the model does classification"):
        prepare_data(recipe("stdlib"), DataShape(task="classification"))


@pytest.mark.parametrize(
    "shape",
    [
        DataShape(task="classification", image_shape=(3, 4, 4), num_classes=5),
        DataShape(task="regression", image_shape=(6,), label_shape=(2,)),
        TEXT,
        replace(TEXT, task="masked_lm"),
    ],
    ids=lambda shape: shape.task,
)
def test_synthetic_sources_need_no_file(shape: DataShape) -> None:
    corpus_recipe = recipe("synthetic")
    sources = [open_data(corpus_recipe, shape, microbatch=MicrobatchPlan(size=6, per_step=2)) for _ in range(2)]
    for left, right in zip(sources[0].microbatches(3), sources[1].microbatches(3), strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)
    steps = list(sources[0].evaluation())
    assert len(steps) == -(-129 // 12)
    last = steps[-1][-1]
    if shape.task == "regression":
        assert sum(float(m["weights"].sum()) for step in steps for m in step) == 129
        assert last["labels"].shape == (6, 2)
        assert float(regression_loss(torch.zeros(6, 2), last)[1]) == 3
    else:
        assert bool((last["labels"][3:] == -100).all())
        assert bool((last["labels"][:3] != -100).any())
    if shape.task == "classification":
        labels = torch.cat([m["labels"] for step in range(20) for m in sources[0].microbatches(step)])
        assert sorted(set(labels.tolist())) == [0, 1, 2, 3, 4]


def test_values_that_are_not_finite_are_named() -> None:
    images = np.zeros((5, 2, 2), np.float32)
    images[3, 1, 0] = np.nan
    with pytest.raises(DataError, match=r"Sample 3 has nan in its field images \(1 of 5"):
        ImageSamples(images, np.zeros(5, np.int64), regression=False)
    labels = np.array([0.0, np.inf], np.float32)
    with pytest.raises(DataError, match="Sample 11 has inf in its field labels"):
        check_finite("labels", labels, np.array([10, 11]))


def test_shape_is_read_off_the_blueprint() -> None:
    def example(batch_size: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.zeros(batch_size, 17, dtype=torch.int64, device="meta")}

    blueprint = Blueprint(
        module=torch.nn.Identity(),
        inputs={"x": "tokens"},
        loss=token_loss,
        initialise=None,
        task="masked_lm",
        vocabulary_size=99,
        example=example,
    )
    corpus_recipe = recipe("synthetic")
    assert data_shape(blueprint, corpus_recipe) == DataShape(task="masked_lm", sequence_length=17, vocabulary_size=99)
    blueprint.vocabulary_size = None
    with pytest.raises(DataError, match="gives no vocabulary_size"):
        data_shape(blueprint, corpus_recipe)
    blueprint = Blueprint(
        module=torch.nn.Identity(),
        inputs={"images": "images"},
        loss=token_loss,
        initialise=None,
        example=lambda size: {
            "images": torch.zeros(size, 64, device="meta"),
            "labels": torch.zeros(size, 3, device="meta"),
        },
    )
    assert data_shape(blueprint, corpus_recipe) == DataShape(task="regression", image_shape=(64,), label_shape=(3,))
    mlp = replace(
        corpus_recipe,
        model=ModelRecipe(reference="mlp", shape=MlpShape(num_layers=1, input_size=4, hidden_size=8, num_classes=7)),
    )
    blueprint.example = None
    assert data_shape(blueprint, mlp) == DataShape(task="classification", num_classes=7)
