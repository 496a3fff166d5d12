"""Keyed dropout: statistics, and masks that no plan changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.comm.mesh import GroupView
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.techniques.core import MicrobatchState, StepContext
from weft.techniques.randomness.keyed_dropout import KeyedDropout, apply_keyed_dropout


class OneRank:
    """A mesh of one rank."""

    def __getitem__(self, name: str) -> GroupView:
        return GroupView((0,), 0, None)


def state(ids=(0, 1, 2, 3), step=1, seed=1, length=64) -> MicrobatchState:
    return MicrobatchState(seed=seed, step=step, sample_ids=torch.tensor(ids), sequence_length=length)


def mask_of(shape, p=0.5, key="a", view=None, cut_dim=None, sequence=False, **keys) -> torch.Tensor:
    context = StepContext(current=state(**keys))
    dropout = KeyedDropout(p, key, context)
    dropout.view, dropout.cut_dim, dropout.sequence_sharded = view, cut_dim, sequence
    return dropout.mask(torch.ones(shape))[0]


@pytest.mark.parametrize("p", [0.003, 0.1, 0.5, 0.9])
def test_keeps_the_asked_share_and_the_mean(p):
    context = StepContext(current=state())
    output = KeyedDropout(p, "a", context)(torch.ones(4, 256, 512, dtype=torch.float64))
    size = output.numel()
    deviation = (p * (1 - p) / size) ** 0.5
    assert abs(float((output == 0).double().mean()) - p) < 4 * deviation
    assert abs(float(output.mean()) - 1) < 5 * deviation / (1 - p)


@pytest.mark.parametrize(
    "other",
    [{"key": "b"}, {"step": 2}, {"seed": 2}, {"ids": (4, 5, 6, 7)}, {"ids": (1, 2, 3, 0)}],
    ids=["layer", "step", "seed", "samples", "shifted samples"],
)
def test_other_keys_draw_independently(other):
    first, second = (mask_of((4, 256, 512), **keys).double() - 0.5 for keys in ({}, other))
    assert abs(float((first * second).mean() * 4)) < 4 / first.numel() ** 0.5


def test_neighbours_are_independent():
    mask = mask_of((4, 256, 512), p=0.5).double() - 0.5
    for dim in (0, 1, 2):
        for distance in (1, 2, 3):
            length = mask.shape[dim] - distance
            product = mask.narrow(dim, 0, length) * mask.narrow(dim, distance, length)
            assert abs(float(product.mean() * 4)) < 4.5 / product.numel() ** 0.5, (dim, distance)
    # Four corners of a rectangle: a hash that only adds a row's and a column's word would tie them.
    corners = mask[:, :-1, :-1] * mask[:, 1:, :-1] * mask[:, :-1, 1:] * mask[:, 1:, 1:]
    assert abs(float(corners.mean() * 16)) < 4.5 / corners.numel() ** 0.5


def test_counts_per_row_are_binomial():
    counts = mask_of((4, 2048, 256), p=0.25).double().sum(-1)
    assert abs(float(counts.var() / (256 * 0.25 * 0.75)) - 1) < 5 * (2 / counts.numel()) ** 0.5


def test_rows_that_are_no_samples_are_refused_where_plans_would_differ():
    """As those of an expert, which takes the tokens of its own; one process may draw anything."""
    rows = torch.ones(7, 64, dtype=torch.float64)
    with pytest.raises(
        PlanError, match=r"experts\.0\.dropout drops elements of \(7, 64\).*4 samples.*Set this dropout"
    ):
        KeyedDropout(0.5, "experts.0.dropout", StepContext(current=state()))(rows)
    dropped = KeyedDropout(0.5, "experts.0.dropout", StepContext(current=state(), is_alone=True))(rows)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}


def test_a_sample_draws_the_same_in_any_microbatch():
    whole = mask_of((4, 10, 6))
    assert torch.equal(whole[1:3], mask_of((2, 10, 6), ids=(1, 2)))
    assert torch.equal(whole.flatten(0, 1), mask_of((40, 6)))


@pytest.mark.parametrize("length", [8, 7, 2])
def test_a_shard_draws_its_part_of_the_whole(length):
    view = [GroupView((0, 1, 2), index, None) for index in range(3)]
    whole = mask_of((4, length, 5, 6))
    sizes = [length // 3 + (index < length % 3) for index in range(3)]
    shards = [
        mask_of((4, size, 5, 6), view=view[i], cut_dim=1, sequence=True, length=length) for i, size in enumerate(sizes)
    ]
    assert torch.equal(whole, torch.cat(shards, 1))
    heads = [mask_of((4, 3, 5, 6), view=view[i], cut_dim=1) for i in range(3)]
    assert torch.equal(mask_of((4, 9, 5, 6)), torch.cat(heads, 1))
    for width in (4, 7):
        features = [mask_of((4, 5, width), view=view[i], cut_dim=-1) for i in range(3)]
        assert torch.equal(mask_of((4, 5, 3 * width)), torch.cat(features, -1))


def test_gradient_is_masked_and_scaled():
    context = StepContext(current=state())
    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    dropout = KeyedDropout(0.25, "a", context)
    output = dropout(x)
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(output, x * grad)
    assert set(grad.unique().tolist()) == {0.0, 1 / 0.75}


def test_identity_in_evaluation_and_nothing_left_at_one():
    x = torch.randn(4, 3)
    assert KeyedDropout(0.5, "a", StepContext()).eval()(x) is x
    assert not KeyedDropout(1.0, "a", StepContext(current=state()))(x).any()


def test_replaces_modules_in_place():
    model = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Dropout2d(0.5)), nn.Linear(2, 2))
    blueprint = Blueprint(module=model, inputs={}, loss=lambda o, b: (o, o), initialise=None)
    context = StepContext(current=state())
    apply_keyed_dropout(model, blueprint, OneRank(), context, sequence=False)
    assert isinstance(model[0], KeyedDropout)
    assert (model[0].key, model[1][0].key) == ("0", "1.0")
    channels = model[1](torch.ones(4, 64, 3, 5)).flatten(2)
    assert torch.equal(channels.amax(-1), channels.amin(-1))
    assert 0 < float((channels == 0).double().mean()) < 1


def test_refuses_what_cannot_be_keyed():
    model = nn.Sequential(nn.AlphaDropout(0.1))
    blueprint = Blueprint(module=model, inputs={}, loss=lambda o, b: (o, o), initialise=None)
    with pytest.raises(PlanError, match="0 is an nn.AlphaDropout, whose draws"):
        apply_keyed_dropout(model, blueprint, OneRank(), StepContext(), sequence=False)
