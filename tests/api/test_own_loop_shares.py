"""A loss that comes of batches of several loaders has one weight: other shares of them are refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from own_loops import PLANS, Hands, Net, fp64, plainly, samples, under
from pool import RankPool
from torch import Tensor
from torch.utils.data import DataLoader

from weft.errors import DataError


def zipped(hands: Hands, *, sizes: Sequence[int], apart: bool = False) -> tuple[list[float], list[Tensor]]:
    """A loss of labelled samples and one of others that the loop has changed; with an evaluation in between."""
    with fp64():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        labelled, others = (DataLoader(samples(2 * size), size) for size in sizes)
        held = DataLoader(samples(5), 5)
        model, optimizer, labelled, others, held = hands.prepare(model, optimizer, labelled, others, held)
        losses = list[float]()
        for (x, y), (u, _) in zip(labelled, others, strict=True):
            first = F.cross_entropy(model(x), y)
            if apart:
                hands.backward(first)
            second = model(u * 1.5).square().mean() if not apart else model(u).square().mean()
            hands.backward(second if apart else first + second)
            optimizer.step()
            optimizer.zero_grad()
            for x, _ in held:
                with torch.no_grad():
                    losses.append(float(hands.gather(model(x)).sum()))
    return losses, []


def losses_of(plan: str, *, sizes: Sequence[int], apart: bool) -> list[float]:
    return under(PLANS[plan], lambda hands: zipped(hands, sizes=sizes, apart=apart))[0]


@pytest.mark.parametrize(("sizes", "apart"), [((4, 8), False), ((3, 8), True)], ids=["even", "apart"])
def test_losses_are_one_processs(ranks: RankPool, sizes: Sequence[int], apart: bool) -> None:
    wanted, _ = plainly(lambda hands: zipped(hands, sizes=sizes, apart=apart))
    for found in ranks.run(2, losses_of, "data", sizes=sizes, apart=apart):
        assert found == pytest.approx(wanted, rel=1e-10)


def test_other_shares_in_one_loss_are_refused(ranks: RankPool) -> None:
    with pytest.raises(DataError, match=r"has [12] of 3 and 4 of 8 samples: no one weight makes a mean"):
        ranks.run(2, losses_of, "data", sizes=(3, 8), apart=False)
