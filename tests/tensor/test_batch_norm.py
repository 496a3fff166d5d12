"""Synchronised batch normalisation equals one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import parity
from weft.comm import Mesh, all_reduce
from weft.parallel import apply_batch_norm
from weft.plan import MeshPlan


def model(momentum: float | None, affine: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False),  # a bias before the norm has no gradient but rounding
        nn.BatchNorm2d(3, momentum=momentum, affine=affine),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 5, bias=False),
        nn.BatchNorm1d(5, momentum=momentum),
    ).double()


def differences(momentum: float | None, affine: bool) -> list[float]:
    mesh = Mesh(MeshPlan(replicate=torch.distributed.get_world_size()), torch.device("cpu"))
    view = mesh["data"]
    alone, mine = model(momentum, affine), model(momentum, affine)
    names = list(mine.state_dict())
    apply_batch_norm(mine, mesh)
    assert list(mine.state_dict()) == names
    assert isinstance(mine[1], nn.BatchNorm2d)
    assert type(mine[1]).__name__ == "BatchNorm2d"
    sizes = [3, 1, 2][: view.size]
    for step in range(3):
        images = torch.randn(sum(sizes), 1, 6, 6, generator=torch.Generator().manual_seed(step)).double() + 5
        mine_images = images.split(sizes)[view.index]
        alone(images).sin().square().sum().backward()
        mine(mine_images).sin().square().sum().backward()
    mine.eval(), alone.eval()
    with torch.no_grad():
        outputs = float((mine(images) - alone(images)).norm() / alone(images).norm())
    buffers = [
        float((a - b).double().norm() / b.double().norm()) for a, b in zip(mine.buffers(), alone.buffers(), strict=True)
    ]
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
    found = {name: all_reduce(parameter.grad.clone(), view) for name, parameter in mine.named_parameters()}
    return [outputs, *buffers, parity.largest_difference(found, wanted)]


@pytest.mark.parametrize(("momentum", "affine"), [(0.1, True), (None, False)])
def test_equals_one_process_on_uneven_samples(ranks, momentum, affine):
    for found in ranks.run(3, differences, momentum, affine):
        assert max(found) <= 1e-10


def test_one_data_rank_keeps_its_modules():
    untouched = model(0.1, True)
    classes = [type(module) for module in copy.deepcopy(untouched).modules()]

    class Alone:
        def __getitem__(self, name):
            from weft.comm import GroupView

            return GroupView((0,), 0, None)

    apply_batch_norm(untouched, Alone())
    assert [type(module) for module in untouched.modules()] == classes
