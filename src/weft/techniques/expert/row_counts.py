"""How experts and rows are shared out, where nobody has counted them.  No torch."""

from __future__ import annotations

from collections.abc import Iterable

from weft.config.plan import MeshPlan, axis_coordinates
from weft.techniques.context.token_runs import tokens_of


def rows_of_expert(rows: int, experts: int, expert: int) -> int:
    """Return how many of `rows` an expert gets where all get equally many, the first ones one more."""
    share, longer = divmod(rows, experts)
    return share + (expert < longer)


def rows_of_rank(rows: int, experts: int, ranks: int, index: int) -> int:
    """Return how many rows come to rank `index` where each of `ranks` ranks sends `rows`, equally many to each
    expert."""
    own = experts // ranks
    return ranks * sum(rows_of_expert(rows, experts, index * own + local) for local in range(own))


def most_tokens_of(length: int, mesh: MeshPlan, ranks: Iterable[int]) -> int:
    """Return how many tokens of a sample that one of `ranks` has which has most."""
    places = {axis_coordinates(mesh, rank)["context"] for rank in ranks}
    return max(tokens_of(length, mesh.context, place) for place in places)
