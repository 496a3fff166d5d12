"""Models of every task by folder: samples that they take, losses that are sums over samples, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.families._draw import Drawn, draw
from model_kit import hf_config, real
from torch import Tensor

from weft.config.plan import MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, DataRecipe, DataSource, ModelRecipe, Recipe, RunRecipe
from weft.errors import DataError, RecipeError
from weft.model.blueprint import Blueprint
from weft.model.hf import build_hf
from weft.run.data import data_shape
from weft.run.data.preparation import prepare_data
from weft.verify.numerics import TrialData

COUNTS = {"encoder-decoder": 2, "vision": 2, "audio": 3, "image-text": 2}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[Drawn]]:
    transformers.logging.set_verbosity_error()
    folder = tmp_path_factory.mktemp("families")
    return folder, draw(7, folder, COUNTS)[0]


def batch_of(blueprint: Blueprint, size: int = 2) -> dict[str, Tensor]:
    data = TrialData(blueprint, Plan(microbatch=MicrobatchPlan(size=size)), data_index=0, seed=1)
    (batch,) = data.microbatches(0)
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def loss_of(module: Any, blueprint: Blueprint, batch: dict[str, Tensor]) -> tuple[float, float]:
    with torch.no_grad():
        outputs = module(**{keyword: batch[name] for keyword, name in blueprint.inputs.items()})
        total, count = blueprint.loss(outputs, batch)
    return float(total), float(count)


@pytest.mark.parametrize("number", range(sum(COUNTS.values())))
def test_a_family_by_folder(drawn: tuple[Path, Sequence[Drawn]], number: int) -> None:
    folder, families = drawn
    one = families[number]
    blueprint = build_hf(ModelRecipe(hf=str(folder / one.name), sequence_length=16))
    assert type(blueprint.module).__name__ == one.architecture
    module, batch = real(blueprint).eval(), batch_of(blueprint)
    total, count = loss_of(module, blueprint, batch)
    assert total > 0, one.name
    if blueprint.per_sample_loss:
        parts = [
            loss_of(module, blueprint, {name: value[at : at + 1] for name, value in batch.items()}) for at in (0, 1)
        ]
        assert sum(part[0] for part in parts) == pytest.approx(total, rel=1e-5), one.name
        assert sum(part[1] for part in parts) == count, one.name


@pytest.mark.parametrize(
    ("architecture", "settings", "label"),
    [
        ("BertForSequenceClassification", {"num_labels": 3}, ((), "int64")),
        ("BertForSequenceClassification", {"num_labels": 1}, ((1,), "float32")),
        (
            "BertForSequenceClassification",
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            ((3,), "float32"),
        ),
        ("BertForTokenClassification", {"num_labels": 3}, ((8,), "int64")),
    ],
)
def test_heads_of_one_encoder(
    architecture: str, settings: dict[str, Any], label: tuple[tuple[int, ...], str], tmp_path: Path
) -> None:
    hf_config("bert", architectures=[architecture], **settings).save_pretrained(tmp_path)
    blueprint = build_hf(ModelRecipe(hf=str(tmp_path), sequence_length=8))
    found = blueprint.samples["labels"]
    assert (found.shape, found.dtype) == label
    total, count = loss_of(real(blueprint).eval(), blueprint, batch_of(blueprint))
    assert total > 0
    assert 0 < count <= 16


def test_what_has_no_task_is_refused(tmp_path: Path) -> None:
    hf_config("bert", architectures=["BertForNextSentencePrediction"]).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"for no task that Weft trains \(.*seq2seq lm"):
        build_hf(ModelRecipe(hf=str(tmp_path)))


def test_what_a_forward_does_not_take_is_its_own_words(tmp_path: Path) -> None:
    config = hf_config("llama", architectures=["LlamaForSequenceClassification"], pad_token_id=None)
    config.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="padding token"):
        build_hf(ModelRecipe(hf=str(tmp_path), sequence_length=8))


def test_corpora_do_not_feed_a_classifier(tmp_path: Path) -> None:
    hf_config("bert", architectures=["BertForSequenceClassification"], num_labels=3).save_pretrained(tmp_path)
    model = ModelRecipe(hf=str(tmp_path), sequence_length=8)
    recipe = Recipe(
        model=model,
        data=DataRecipe(train=(DataSource(source="stdlib"),)),
        batch=BatchRecipe(global_batch_size=2),
        run=RunRecipe(steps=1),
    )
    with pytest.raises(DataError, match=r"stdlib cannot feed this model.*labels \(one whole number below 3\)"):
        prepare_data(recipe, data_shape(build_hf(model), recipe))
