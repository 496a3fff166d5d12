"""What a loop of one's own sees of the weights between two steps."""

from __future__ import annotations

import pytest
import torch
from test_session import BATCH, TwiceTied
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.model.families import CutTable


def sizes_between_steps(zero: int, folder: str) -> set[bool]:
    """Whether weights, which the loop may look at, are whole and alike on all ranks after each step."""
    torch.manual_seed(0)
    model = TwiceTied()
    tokens = torch.randint(0, 11, (2, 48), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens[0], tokens[1]), batch_size=BATCH)
    plan = Plan(
        mesh=MeshPlan(replicate=2), data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=3, per_step=2),
    )  # fmt: skip

    def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)

    cut = CutTable(entry="entry", blocks=("blocks.0", "blocks.1"), tail=("tail",))
    found = set[bool]()
    with weft.session(plan=plan, folder=folder, quiet=True) as session:
        state = session.prepare(model, torch.optim.Adam(model.parameters()), loader, loss=loss, cut=cut)
        for _ in map(state.step, state.batches(3)):
            mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            both = [torch.empty_like(mine), torch.empty_like(mine)]
            torch.distributed.all_gather(both, mine)
            found.add(torch.equal(*both) and all(parameter.numel() for parameter in model.parameters()))
    return found


@pytest.mark.parametrize("zero", [1, 2])
def test_a_loop_of_ones_own_sees_whole_weights_after_every_step(ranks, tmp_path, zero) -> None:
    assert ranks.run(2, sizes_between_steps, zero, str(tmp_path)) == [{True}] * 2
