"""What can be chosen of a split besides its sizes: schemes, and how the axes lie on the hardware."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

from weft.plan import AXES, Axis
from weft.price import Layout, Pricer, check_layout
from weft.search._space import Space

_LEAST = 2
"""Data ranks that another axis goes round at least, where the data axis lies inside it."""


def variants(pricer: Pricer, space: Space, layout: Layout) -> Iterator[Layout]:
    """Yield a layout with every choice that changes what its blocks cost: sequence parallelism and the schemes."""
    has_tensor, has_context = layout.tensor > 1, layout.context > 1
    for parallel, scheme, way in product(
        space.sequence_parallels if has_tensor else (False,),
        space.tensor_schemes if has_tensor else space.tensor_schemes[:1],
        space.context_schemes if has_context else space.context_schemes[:1],
    ):
        found = replace(layout, sequence_parallel=parallel, tensor_scheme=scheme, context_scheme=way)
        if not has_tensor or not check_layout(pricer.profile, pricer.cluster, found):
            yield found


def arrangements(pricer: Pricer, space: Space, layout: Layout, *, several_data_ranks: bool) -> Iterator[Layout]:
    """Yield one stage of a layout in every order of its tensor, context and data axes, innermost first or last.

    Where a stage's ranks lie among those of others changes no figure for the better, so what these layouts cost is the
    least of all orders.  Inside another axis the data axis counts as two ranks, its least.
    """
    data: tuple[Axis, ...] = ("replicate", "shard")
    large: list[tuple[Axis, ...]] = [data] if several_data_ranks else []
    large += [(axis,) for axis in ("context", "tensor") if getattr(layout, axis) > 1]
    one = replace(layout, pipeline=1, replicate=1, shard=_LEAST if several_data_ranks else 1)
    if layout.expert > one.expert_room:
        one = replace(one, shard=layout.expert // (layout.context * layout.replicate))
    if not pricer.cluster.has_accelerators:  # a group has one split, of which all is known
        one = layout
    if space.orders is not None:
        yield from (replace(one, order=order) for order in space.orders)
        return
    for chosen in permutations(large):
        inner = [axis for axes in chosen for axis in axes]
        rest = [axis for axis in AXES if axis not in inner and axis != "expert"]
        order: list[Axis] = [*rest, *inner]
        order.insert(max(order.index("replicate"), order.index("shard")) + 1, "expert")
        yield replace(one, order=tuple(order))
