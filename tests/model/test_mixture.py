"""A mixture against its sum over tokens and choices, written out; gradients of experts without tokens; order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.model.reference.mixture import Experts, Mixture, Router, Scoring, arrange

HIDDEN, FFN, EXPERTS, TOP_K = 8, 12, 6, 2


def mixture(scoring: Scoring = "softmax", *, normalise: bool = True, shared: bool = False) -> Mixture:
    torch.manual_seed(0)
    router = Router(HIDDEN, EXPERTS, TOP_K, scoring=scoring, normalise=normalise, biased=scoring == "sigmoid", std=1.0)
    experts = Experts(EXPERTS, HIDDEN, FFN, std=1.0)
    made = Mixture(router, experts, nn.Linear(HIDDEN, HIDDEN) if shared else None).double()
    router.reset_parameters()
    experts.reset_parameters()
    if router.bias is not None:
        router.bias.uniform_(-0.5, 0.5)
    return made


def tokens_of(count: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, count // 2, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()


def written_out(made: Mixture, hidden: Tensor) -> Tensor:
    """One token and one choice after another."""
    flat, experts = hidden.reshape(-1, HIDDEN), made.experts
    logits = flat @ made.router.weight.T
    scores = logits.sigmoid() if made.router.scoring == "sigmoid" else logits.softmax(-1)
    sums: list[Tensor] = []
    for token, score in zip(flat, scores, strict=True):
        biased = score if made.router.bias is None else score + made.router.bias
        chosen = biased.argsort(descending=True)[:TOP_K]
        weights = score[chosen] / score[chosen].sum() if made.router.normalise else score[chosen]
        parts: list[Tensor] = []
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate, up = (experts.gate_up[expert] @ token).chunk(2)
            parts.append(weight * (experts.down[expert] @ (F.silu(gate) * up)))
        sums.append(torch.stack(parts).sum(0))
    mixed = torch.stack(sums).view(hidden.shape)
    return mixed if made.shared is None else mixed + made.shared(hidden)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_equals_the_sum_written_out(scoring: Scoring, normalise: bool, shared: bool):
    made, hidden = mixture(scoring, normalise=normalise, shared=shared), tokens_of()
    seen = torch.randn(hidden.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    grads: list[tuple[Tensor, ...]] = []
    for output in (made(hidden), written_out(made, hidden)):
        grads.append((output, *torch.autograd.grad((output * seen).sum(), [hidden, *made.parameters()])))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [0, 3])
def test_experts_without_rows_get_zeros(rows: int):
    experts = mixture().experts
    counts = torch.tensor([0, rows, 0, 0, 0, 0])
    experts(torch.ones(rows, HIDDEN, dtype=torch.float64), counts).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        seen = [bool(matrix.any()) for matrix in parameter.grad]
        assert seen == [False, rows > 0, False, False, False, False]


def test_the_order_of_tokens_changes_no_bit():
    made, hidden = mixture(shared=True), tokens_of()
    flat = hidden.reshape(-1, HIDDEN)
    turned = torch.randperm(flat.shape[0], generator=torch.Generator().manual_seed(3))
    made.experts.forward = lambda rows, counts: rows * 3.0  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(made(flat)[turned], made(flat[turned]), rtol=0, atol=1e-15)


def test_copies_of_an_expert_stand_in_the_order_of_tokens():
    chosen = torch.tensor([[2, 0], [0, 1], [2, 1]])
    order, places, counts = arrange(chosen, 4)
    assert order.tolist() == [1, 2, 3, 5, 0, 4]
    assert places.tolist() == [[4, 0], [1, 2], [5, 3]]
    assert counts.tolist() == [2, 2, 2, 0]
