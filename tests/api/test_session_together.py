"""What the ranks of a loop tell one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_loops import PLANS
from pool import RankPool

import weft
from weft.errors import DataError


def told(name: str) -> dict[str, Any]:
    with weft.session(plan=PLANS[name], permit=("fp64",), quiet=True, record=False) as session:
        rank, found = session.rank, dict[str, Any]()
        session.wait()
        own = {"at": rank, "rows": torch.full((2, 3), rank), "pair": (rank, [None, "ä"]), "flag": torch.tensor(True)}
        found["broadcast"] = session.broadcast(own, source=session.world_size - 1)
        found["gathered"] = session.all_gather(torch.arange(rank + 1, dtype=torch.int16))
        mine = torch.tensor([1.0 + rank, 8.0])
        found |= {each: session.all_reduce(mine, each) for each in ("sum", "mean", "min", "max")}  # type: ignore[arg-type]
        found["count"] = session.all_reduce(torch.tensor(3))
        found["kept"] = torch.equal(mine, torch.tensor([1.0 + rank, 8.0]))
        found["data ranks"] = session.num_data_ranks
        with pytest.raises(DataError, match="value/open is a function"):
            session.broadcast({"open": told})
        with pytest.raises(DataError, match="cannot 'product'"):
            session.all_reduce(mine, "product")  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("name", ["data", "data of 4", "tensor", "data and tensor"])
def test_ranks_tell_one_another(ranks: RankPool, name: str) -> None:
    """Ranks that have the same samples count once."""
    mesh = PLANS[name].mesh
    last, data, width = mesh.world_size - 1, mesh.data, mesh.tensor
    firsts = [rank * width for rank in range(data)]
    for found in ranks.run(mesh.world_size, told, name):
        sent = found["broadcast"]
        assert (sent["at"], sent["pair"], bool(sent["flag"])) == (last, (last, [None, "ä"]), True)
        assert torch.equal(sent["rows"], torch.full((2, 3), last))
        assert [each.tolist() for each in found["gathered"]] == [list(range(rank + 1)) for rank in firsts]
        assert found["gathered"][0].dtype is torch.int16
        assert found["min"].tolist() == [1.0, 8.0]
        assert found["max"].tolist() == [float(mesh.world_size), 8.0]
        assert found["count"].item() == 3 * data
        assert found["sum"][1].item() == 8.0 * data
        assert found["mean"].tolist() == [1.0 + last / 2, 8.0]
        assert found["kept"]
        assert found["data ranks"] == data
