"""The second half of a split backward: the same gradients, later, in place, with hooks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from weft.techniques.pipeline.weight_pass import WeightPass, deferring


class Everything(nn.Module):
    """Every call that can be deferred, one weight used twice, and parameters that cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6, bias=False)
        self.matrix = nn.Parameter(torch.randn(6, 6))
        self.shift = nn.Parameter(torch.randn(6))
        self.conv1 = nn.Conv1d(4, 4, 3, padding=1, stride=1, groups=2)
        self.conv2 = nn.Conv2d(1, 2, 3, padding=(1, 2), dilation=(1, 2), bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.twice(self.linear(self.norm(hidden)).relu())
        hidden = self.twice(self.conv1(hidden)) + self.frozen(hidden)
        hidden = torch.addmm(self.shift, hidden.flatten(0, 1), self.matrix).view_as(hidden)
        return self.conv2(hidden[:, None]).sum(1)


DEFERRED = {
    "linear.weight",
    "linear.bias",
    "twice.weight",
    "matrix",
    "shift",
    "conv1.weight",
    "conv1.bias",
    "conv2.weight",
}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradients_come_later_and_equal_a_whole_backward(recompute: bool) -> None:
    torch.manual_seed(0)
    model = Everything().double()
    source = torch.randn(3, 4, 6, dtype=torch.float64)
    direct = source.clone().requires_grad_()
    model(direct).square().sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    views: dict[str, Tensor] = {}
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            views[name] = parameter.grad = torch.zeros(parameter.numel() + 1, dtype=torch.float64)[1:].view_as(
                parameter
            )
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    queue, later = WeightPass(), source.clone().requires_grad_()
    with deferring(queue):
        output = checkpoint(model, later, use_reentrant=False) if recompute else model(later)
        loss = output.square().sum()
        torch.autograd.backward([get_gradient_edge(loss)], [torch.ones_like(loss)])
    assert later.grad is not None
    assert direct.grad is not None
    torch.testing.assert_close(later.grad, direct.grad)
    assert {name for name, view in views.items() if not view.any()} == DEFERRED
    assert not DEFERRED & set(fired)
    queue.run()
    assert sorted(fired) == sorted(views), "every parameter's hook fires once"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is views[name]
            torch.testing.assert_close(views[name], wanted[name], rtol=1e-12, atol=1e-12)


def test_gradients_of_low_precision_accumulate_in_their_own_dtype() -> None:
    weight = nn.Parameter(torch.randn(5, 5, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = view = torch.zeros(5, 5)
    source = torch.randn(3, 5, dtype=torch.bfloat16, requires_grad=True)
    queue = WeightPass()
    with deferring(queue):
        F.linear(source, weight).sum().backward()
    queue.run()
    assert weight.grad is view
    torch.testing.assert_close(view, source.float().sum(0).expand(5, 5), rtol=1e-2, atol=1e-2)


def test_inputs_without_gradient_and_evaluation_are_left_alone() -> None:
    linear, source = nn.Linear(3, 3), torch.randn(2, 3)
    queue = WeightPass()
    with deferring(queue):
        linear(source).sum().backward()
        with torch.no_grad():
            linear(source.requires_grad_())
    assert linear.weight.grad is not None
    assert linear.weight.grad.any()
    queue.run()
