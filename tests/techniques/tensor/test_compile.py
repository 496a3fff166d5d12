"""Compiled blocks compute the same with keyed dropout and recomputation.

In a process of its own: Dynamo leaves semaphores and references behind that the suite would count against the pool.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft.run.launch.launcher import launch_function

PROGRAM = """
from functools import partial
import parity, small
loss, gradients = parity.compare(partial(small.decoder, 9, 0.2), parity.plan_of(recompute="{}", compile=True))
assert loss <= 1e-12 and gradients <= 1e-10, (loss, gradients)
"""

TWICE = """
import copy, torch
from torch import nn
from torch._dynamo.utils import counters
from weft.errors import PlanError
from weft.model.blueprint import Blueprint
from weft.model.families import CutTable
from weft.techniques.core import MicrobatchState, StepContext
from weft.techniques.randomness.keyed_dropout import KeyedDropout
from weft.config.plan import ComputePlan, MemoryPlan, Plan
from weft.techniques.compute.compiling import apply_compile
from weft.techniques.recompute.blocks import apply_recompute

class Block(nn.Module):
    def __init__(self, key):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), KeyedDropout(0.5, key, context)
    def forward(self, x):
        return self.dropout(self.linear(self.dropout(x)).tanh())

context = StepContext()
plain = nn.Sequential(nn.Identity(), Block("1.dropout"), Block("2.dropout")).double()
made = copy.deepcopy(plain)
for mine, its in zip(made[1:], plain[1:]):
    mine.dropout.context = its.dropout.context = context
plan = Plan(compute=ComputePlan(compile=True), memory=MemoryPlan(recompute="{}"))
cut = CutTable(entry="0", blocks=("1", "2"))
blueprint = Blueprint(module=made, inputs=dict(x="x"), loss=None, initialise=None, cut=cut)
apply_recompute(made, blueprint, plan, context)
apply_compile(made, blueprint, plan, context, backend="aot_eager")
x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
def gradients(model, step):
    state = MicrobatchState(seed=1, step=step, sample_ids=torch.arange(4), sequence_length=None)
    model.zero_grad()
    with context.entered(state):
        model(x).square().sum().backward()
    return [each.grad.clone() for each in model.parameters()]
for step in range(4):
    for one, other in zip(gradients(plain, step), gradients(made, step), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
assert counters["stats"]["unique_graphs"] == 1, counters
with context.entered(MicrobatchState(seed=1, step=9, sample_ids=torch.arange(4), sequence_length=None)):
    made(x)
    try:
        made(x)
    except PlanError as error:
        assert "is called more than once in a forward" in str(error)
    else:
        raise AssertionError("the second call drops what the first did")
"""


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_dropout_that_a_block_calls_twice_draws_twice(recompute):
    command = [sys.executable, "-c", TWICE.format(recompute)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_equal_one_process(recompute):
    command = [sys.executable, "-c", PROGRAM.format(recompute)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_blocks_in_bf16_are_one_graph_while_gradients_are_summed_in_fp32(zero):
    (found,) = launch_function("compiled_halves:train", {"zero": zero}, 1)
    assert found["breaks"] == {}
    assert found["graphs"] == 1  # of three blocks
    assert found["compiled"] == pytest.approx(found["eager"], rel=1e-3)
