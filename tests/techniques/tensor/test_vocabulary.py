"""The vocabulary loss, fused and split, equals the plain one."""

from __future__ import annotations

from functools import partial

import pytest
import small
import torch
import torch.nn.functional as F

import parity
from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import MeshPlan
from weft.techniques.fused_loss.vocabulary import VocabularyLogits, fused_cross_entropy, vocabulary_cross_entropy

ALONE = GroupView((0,), 0, None)
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def problem(dtype=torch.float64, tokens=300, hidden=16, vocabulary=24, spread=1.0, ignored=True):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, hidden, generator=generator, dtype=torch.float64) * spread
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    if ignored:
        labels[::3] = -100
    return [t.to(dtype).requires_grad_() for t in (x, weight, bias)], labels


def plain(x, weight, bias, labels):
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.cross_entropy(F.linear(x, weight, bias).to(wide), labels, ignore_index=-100, reduction="sum")


def relative(mine, wanted):
    mine, wanted = mine.detach().double(), wanted.detach().double()
    return float((mine - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ignored", [False, True])
def test_fused_equals_plain(dtype, ignored):
    inputs, labels = problem(dtype, ignored=ignored)
    wanted, mine = plain(*inputs, labels), fused_cross_entropy(*inputs, labels, ALONE)
    assert mine.dtype == wanted.dtype
    assert relative(mine, wanted) < DTYPES[dtype]
    for found, right in zip(*(torch.autograd.grad(0.3 * loss, inputs) for loss in (mine, wanted)), strict=True):
        assert found.dtype == right.dtype
        assert relative(found, right) < DTYPES[dtype]


def test_no_labels_at_all():
    inputs, labels = problem()
    loss = fused_cross_entropy(*inputs, torch.full_like(labels, -100), ALONE)
    assert loss == 0
    assert all(not grad.any() for grad in torch.autograd.grad(loss, inputs))


def test_frozen_head_and_no_grad():
    (x, weight, _), labels = problem()
    (grad,) = torch.autograd.grad(fused_cross_entropy(x, weight.detach(), None, labels, ALONE), x)
    assert grad.any()
    with torch.no_grad():
        assert fused_cross_entropy(x, weight, None, labels, ALONE) > 0


def test_second_backward_is_refused():
    inputs, labels = problem()
    loss = fused_cross_entropy(*inputs, labels, ALONE)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


def test_never_holds_the_logits():
    """Peak of the allocations, by torch's own profiler: far below one copy of the logits."""
    tokens, vocabulary, hidden = 4096, 4096, 8
    inputs, labels = problem(torch.float32, tokens, hidden, vocabulary, ignored=False)
    with torch.profiler.profile(profile_memory=True) as profile:
        fused_cross_entropy(*inputs, labels, ALONE).backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= tokens * vocabulary * 4 / 7


def split_loss(fused: bool, spread: float) -> list[float]:
    mesh = Mesh(MeshPlan(tensor=torch.distributed.get_world_size()), torch.device("cpu"))
    view = mesh["tensor"]
    inputs, labels = problem(spread=spread)
    wanted = plain(*inputs, labels)
    right = torch.autograd.grad(wanted, inputs)
    rows = inputs[1].shape[0] // view.size
    mine = [inputs[0], *(t[view.index * rows : (view.index + 1) * rows].detach().requires_grad_() for t in inputs[1:])]
    if fused:
        loss = fused_cross_entropy(*mine, labels, view)
    else:
        loss = vocabulary_cross_entropy(F.linear(*mine), labels, view)
    found = list(torch.autograd.grad(loss, mine))
    torch.distributed.all_reduce(found[0])
    right = [right[0], *(t[view.index * rows : (view.index + 1) * rows] for t in right[1:])]
    whole = VocabularyLogits(view=view, hidden=mine[0], weight=mine[1], bias=mine[2]).materialise()
    same = relative(whole, F.linear(*inputs))
    return [relative(loss, wanted), same, *(relative(a, b) for a, b in zip(found, right, strict=True))]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("spread", [1.0, 300.0], ids=["mild", "extreme"])
def test_split_vocabulary_equals_whole(ranks, fused, spread):
    for differences in ranks.run(4, split_loss, fused, spread):
        assert max(differences) < 1e-11


def outside_a_step(fused: bool):
    blueprint, batches = small.decoder()
    built = parity.build(blueprint, parity.plan_of(2, fused=fused))
    alone = parity.build(blueprint, parity.plan_of(fused=False))
    built.part.eval(), alone.part.eval()
    with torch.no_grad():
        return relative(built.part(batches[0]["tokens"]), alone.part(batches[0]["tokens"]))


@pytest.mark.parametrize("fused", [True, False])
def test_real_logits_outside_a_step(ranks, fused):
    assert max(ranks.run(2, outside_a_step, fused)) < 1e-12


def test_state_dict_is_unchanged(ranks):
    for names in ranks.run(1, partial(names_of, True)):
        assert names == list(small.decoder()[0].module.state_dict())


def names_of(fused: bool) -> list[str]:
    return list(parity.build(small.decoder()[0], parity.plan_of(1, fused=fused)).part.state_dict())
