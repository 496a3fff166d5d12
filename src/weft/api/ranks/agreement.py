"""Compare the run's facts over ranks before their collectives could go astray."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.errors import DataError, LaunchError, RecipeError, WeftError

LEFT = "what forwards have made of "
"""Beginning of the names of facts about state that no optimizer updates."""
SET_BY_LOOP = "what the loop has set of the model: "
"""Beginning of the names of facts about plain attributes; a rank that has none of them has not looked."""

UNKNOWN = "unknown"
"""Value of a fact that a rank cannot tell: no other rank differs from it."""


def check_same_on_all_ranks(recipe: Recipe, plan: Plan) -> None:
    """Compare recipe and plan over the default group.  Call on every rank; nothing is asked of a single one.

    Raises:
        LaunchError: on every rank, when they differ anywhere.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = [int(recipe.digest, 16), int(plan.digest, 16)]
    low, high = torch.tensor(mine), torch.tensor(mine)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    differing = [name for name, a, b in zip(("recipe", "plan"), low.tolist(), high.tolist(), strict=True) if a != b]
    if differing:
        raise LaunchError(
            f"the ranks were given different {' and '.join(differing)}s (this one has recipe {recipe.digest}, plan"
            f" {plan.digest}). Give all hosts the same files; where `auto` sees different machines, write one plan with"
            " `weft plan --output plan.toml` and give that."
        )


def check_same_facts(facts: Mapping[str, str], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Compare what ranks say of their data (names that begin with `data`) and of all else.  Call on every rank.

    Raises:
        DataError, RecipeError: on every rank, when they differ; the first difference is named with its ranks.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    facts_of_ranks = [json.loads(text) for text in gather_texts(json.dumps(dict(facts)), device, group)]
    for name in dict.fromkeys(name for one in facts_of_ranks for name in one):
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(facts_of_ranks):
            missing = UNKNOWN if name.startswith(SET_BY_LOOP) else "nothing"
            if (value := one.get(name, missing)) != UNKNOWN:
                values.setdefault(value, []).append(rank)
        if len(values) > 1:
            raise differs(name, values)


def check_same_batches(digest: str, device: torch.device, group: dist.ProcessGroup) -> None:
    """Compare a batch over the ranks of a group by its digest.  Call on every rank.

    Raises:
        DataError: on every rank, when they differ.
    """
    if not is_same(digest, device, group):
        raise DataError(
            "the loader yields other batches on other ranks, so the global batch is not what it says. Seed its order"
            " equally on all ranks (by a generator= of the sampler's own, since torch's is seeded by rank in each"
            " step), or use a torch DataLoader over a map-style dataset, which Weft shuffles itself."
        )


def differs(name: str, values: Mapping[str, Sequence[int]]) -> WeftError:
    """The error that names a fact, its values and the ranks that have each."""
    whole = ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items())
    if name.startswith("data"):
        return DataError(
            f"{name.removeprefix('data: ')} differs between the ranks: {whole}. Give every rank the same whole data,"
            " in one order; Weft gives each its share."
        )
    if name.startswith(LEFT):
        return RecipeError(
            f"{name.removeprefix(LEFT)} differs between the ranks: {whole}. No optimizer updates it, and each rank has"
            " changed its copy by itself: in a forward by its own samples, or in the loop on some ranks only. Train on"
            " one process with the whole batch in one microbatch, or make the change between two steps, on all ranks"
            " alike."
        )
    if name.startswith(SET_BY_LOOP):
        return RecipeError(
            f"the loop has set {name.removeprefix(SET_BY_LOOP)} of the model by what it has read of weights of which"
            f" each rank has a part, and it differs between the ranks: {whole}. Compute it in the model's forward, or"
            " write it as a parametrization there; or use a plan that leaves weights whole (mesh.tensor = 1,"
            " mesh.pipeline = 1)."
        )
    return RecipeError(
        f"{name} differs between the ranks: {whole}. Give every rank the same settings, and change them (a scheduler's"
        " step() too) on all ranks alike, outside `if session.rank == 0:`."
    )


def is_same(text: str, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Return whether all ranks have the same text, by one small collective.  Call on every rank of `group`."""
    mine = xxhash.xxh64_intdigest(text.encode()) >> 12
    extremes = torch.tensor([mine, -mine], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return int(extremes[0]) == -int(extremes[1])


def take_weights_of_rank_0(module: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Constructed models differ between ranks unless every rank was seeded alike; so one rank's weights go to all."""
    if group is None:
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            moved = tensor.detach().to(device).contiguous()
            parts = torch.view_as_real(moved) if moved.is_complex() else moved
            dist.broadcast(parts.view(torch.uint8) if parts.dtype is torch.bool else parts, src=0, group=group)
            tensor.copy_(moved)


def gather_texts(text: str, device: torch.device, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return every rank's text, in their order.  Call on every rank."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [bytes(one[: int(size)].tolist()).decode() for one, size in zip(gathered, sizes, strict=True)]
