"""Synchronised batch normalisation equals one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import parity
from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.config.plan import MeshPlan
from weft.techniques.data.batch_norm import apply_batch_norm


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

    apply_batch_norm(untouched, Mesh(MeshPlan(), torch.device("cpu")))
    assert [type(module) for module in untouched.modules()] == classes


def narrow_differences() -> tuple[float, float, float, set[torch.dtype]]:
    """Of bf16 weights beside fp32 statistics against all in fp32: outputs in training, in evaluation, and buffers."""
    mesh = Mesh(MeshPlan(replicate=torch.distributed.get_world_size()), torch.device("cpu"))
    view = mesh["data"]
    alone, mine = model(0.1, True).float(), model(0.1, True).float()
    for parameter in mine.parameters():
        parameter.data = parameter.data.bfloat16()
    apply_batch_norm(mine, mesh, is_narrow=True)
    images = torch.randn(4 * view.size, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    own = images.chunk(view.size)[view.index]
    whole, part = alone(images), mine(own.bfloat16())
    part.sum().backward()
    training = distance(part, whole.chunk(view.size)[view.index])
    buffers = [(a, b) for a, b in zip(mine.buffers(), alone.buffers(), strict=True) if a.is_floating_point()]
    alone.eval(), mine.eval()
    with torch.no_grad():
        evaluation = distance(mine(own.bfloat16()), alone(own))
    return training, evaluation, max(distance(a, b) for a, b in buffers), {a.dtype for a, _ in buffers}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("world", [1, 2])
def test_statistics_stay_in_fp32_beside_bf16_weights(ranks, world):
    for training, evaluation, buffers, dtypes in ranks.run(world, narrow_differences):
        assert max(training, evaluation) < 0.03
        assert 0 < buffers < 0.02
        assert dtypes == {torch.float32}
