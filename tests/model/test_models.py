"""Shapes, tables, losses and stages of all families."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from model_kit import HF_FAMILIES, REFERENCES, batch_of, build_family, real, run, stage_by_hand
from torch import Tensor

from weft.config.recipe import DecoderShape, EncoderShape
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint, logits_of
from weft.model.build import build_reference
from weft.model.losses import class_loss, loss_by_name, regression_loss, token_loss

FAMILIES = (*REFERENCES, *HF_FAMILIES)


@pytest.fixture(scope="module", params=FAMILIES)
def blueprint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Blueprint:
    return build_family(request.param, tmp_path_factory.mktemp(request.param))


def test_meta_forward_has_the_shape_of_the_real_one(blueprint: Blueprint) -> None:
    assert blueprint.example is not None
    assert all(parameter.is_meta for parameter in blueprint.module.parameters())
    shapes = logits_of(run(blueprint.module, blueprint, blueprint.example(2)))
    batch = batch_of(blueprint)
    logits = logits_of(run(real(blueprint), blueprint, batch))
    assert logits.shape == shapes.shape
    assert logits.dtype == torch.float64
    total, count = blueprint.loss(logits, batch)
    total.backward()
    assert count.item() == batch["labels"].numel()
    assert torch.isfinite(total)


def test_every_rule_and_name_of_the_tables_is_in_the_model(blueprint: Blueprint) -> None:
    names = [name for name, _ in blueprint.module.named_modules()]
    for rule in (*blueprint.split, *blueprint.localise):
        assert any(fnmatchcase(name, rule.match) for name in names), rule
    cut = blueprint.cut
    assert cut is not None
    assert {*cut.stem, *cut.blocks, *cut.tail} <= set(names)
    assert blueprint.vocabulary_head is None or blueprint.vocabulary_head in names
    assert len(blueprint.block_costs) == len(cut.blocks) + 2
    assert blueprint.flops_per_sample > 0


@pytest.mark.parametrize("bounds", [(0, 1, 3), (0, 1, 2, 3)])
def test_stages_by_substitution_compose_to_the_whole(blueprint: Blueprint, bounds: tuple[int, ...]) -> None:
    whole, batch = real(blueprint).eval(), batch_of(blueprint)
    expected = logits_of(run(whole, blueprint, batch))
    activation: Tensor | None = None
    for first, last in zip(bounds, bounds[1:], strict=False):
        stage = stage_by_hand(whole, blueprint, first, last, activation)
        activation = logits_of(run(stage, blueprint, batch))
        assert set(stage.state_dict()) <= set(whole.state_dict())
    torch.testing.assert_close(activation, expected, rtol=0, atol=0)


def test_a_bfloat16_model_runs(blueprint: Blueprint) -> None:
    module = real(blueprint, torch.bfloat16).eval()
    batch = {
        name: field.bfloat16() if field.is_floating_point() else field for name, field in batch_of(blueprint).items()
    }
    logits = logits_of(run(module, blueprint, batch))
    assert logits.dtype == torch.bfloat16
    exact = logits_of(run(real(blueprint, torch.float32).eval(), blueprint, {k: _wide(v) for k, v in batch.items()}))
    assert (logits.float() - exact).norm() < 0.05 * exact.norm()


def _wide(field: Tensor) -> Tensor:
    return field.float() if field.is_floating_point() else field


@pytest.mark.parametrize("family", ["decoder", "llama", "gpt2"])
def test_isolated_documents_do_not_see_one_another(family: str, tmp_path: Path) -> None:
    from model_kit import hf_config

    from weft.config.recipe import ModelRecipe
    from weft.model.hf import build_hf

    if family == "decoder":
        blueprint = build_reference(REFERENCES["decoder"], isolated_documents=True)
    else:
        hf_config(family).save_pretrained(tmp_path)
        blueprint = build_hf(ModelRecipe(hf=str(tmp_path), sequence_length=12), isolated_documents=True)
    module = real(blueprint).eval()
    tokens = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(1))
    lengths = (5, 7)
    batch = {
        "tokens": tokens,
        "positions": torch.cat([torch.arange(length) for length in lengths])[None],
        "document_ids": torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))[None],
    }
    together = logits_of(run(module, blueprint, batch))
    alone = [
        logits_of(run(module, blueprint, {name: field[:, where] for name, field in batch.items()}))
        for where in (slice(0, 5), slice(5, 12))
    ]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-12, atol=1e-14)


def test_dropouts_are_modules_and_do_nothing_in_evaluation() -> None:
    shape = DecoderShape(num_layers=1, hidden_size=16, num_heads=2, vocabulary_size=32, sequence_length=8, dropout=0.5)
    blueprint = build_reference(shape)
    module, batch = real(blueprint), batch_of(blueprint)
    batch["tokens"] %= 32
    drawn = [run(module.train(), blueprint, batch) for _ in range(2)]
    kept = [run(module.eval(), blueprint, batch) for _ in range(2)]
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(kept[0], kept[1])


def test_encoder_attention_equals_the_fused_kernel_when_nothing_is_dropped() -> None:
    blueprint = build_reference(EncoderShape(num_layers=2, hidden_size=16, num_heads=2, vocabulary_size=32))
    module = real(blueprint)
    tokens = torch.randint(0, 32, (2, 9))
    mask = torch.ones(2, 9)
    mask[:, 6:] = 0
    fused = module.eval()(tokens, mask)
    for dropout in [child for child in module.modules() if isinstance(child, torch.nn.Dropout)]:
        dropout.p = 0.0
    torch.testing.assert_close(module.train()(tokens, mask), fused, rtol=1e-12, atol=1e-14)
    other = tokens.clone()
    other[:, 6:] = 0
    torch.testing.assert_close(module.eval()(other, mask)[:, :6], fused[:, :6], rtol=1e-12, atol=1e-14)


class _Lazy:
    def cross_entropy(self, labels: Tensor) -> Tensor:
        return torch.tensor(3.0) + (labels != -100).sum()


def test_token_loss_ignores_masked_labels_and_widens() -> None:
    logits = torch.randn(2, 5, 11, dtype=torch.bfloat16)
    labels = torch.randint(0, 11, (2, 5))
    labels[0, :3] = -100
    total, count = token_loss(logits, {"labels": labels})
    kept = labels != -100
    expected = torch.nn.functional.cross_entropy(logits.float()[kept], labels[kept], reduction="sum")
    assert (count.item(), total.dtype) == (7, torch.float32)
    torch.testing.assert_close(total, expected)
    assert token_loss(logits.double(), {"labels": labels})[0].dtype == torch.float64
    assert token_loss(_Lazy(), {"labels": labels})[0].item() == 10
    nothing, none = token_loss(logits, {"labels": torch.full((2, 5), -100)})
    assert (nothing.item(), none.item()) == (0, 0)


def test_class_and_regression_losses_sum_over_samples() -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, -100])
    total, count = class_loss(logits, {"labels": labels})
    torch.testing.assert_close(total, torch.nn.functional.cross_entropy(logits[:3], labels[:3], reduction="sum"))
    assert count.item() == 3
    predicted, wanted = torch.randn(4, 2), torch.randn(4, 2)
    total, count = regression_loss(predicted, {"labels": wanted})
    torch.testing.assert_close(total / count, torch.nn.functional.mse_loss(predicted, wanted).to(torch.float64))
    assert regression_loss(predicted[:, :1], {"labels": wanted[:, 0]})[1].item() == 4


def test_losses_by_name() -> None:
    assert loss_by_name("tokens") is token_loss
    assert loss_by_name("weft.model.losses:class_loss") is class_loss
    with pytest.raises(RecipeError, match="Did you mean classes"):
        loss_by_name("clases")
    with pytest.raises(RecipeError, match=r"cannot be called as loss\(outputs, batch\)"):
        loss_by_name("weft.model.build:build_reference")
