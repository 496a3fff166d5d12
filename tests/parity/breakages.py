"""Pieces of Weft deliberately broken inside a rank, each the mistake that is easily made in its place.

`entered(name)` patches attributes of Weft's own modules for one run and gives `build(recipe)`, by which the run builds
its model.  The parity comparison must fail under every one of them (`test_breakages`); nothing of torch is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial as partial_of
from typing import Any

import channel_breakages
import dispatcher_breakages
import scored_breakages
import token_breakages
import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm.collectives import shard_of
from weft.comm.flat import Collectives
from weft.comm.reduce import nothing_to_wait_for
from weft.config.recipe import Recipe
from weft.model.blueprint import Batch, Blueprint
from weft.model.build import build_model
from weft.run.engine import _step
from weft.techniques.context import attention, partial, token_runs, ulysses
from weft.techniques.context import runtime as context
from weft.techniques.context.exchange import RingExchange
from weft.techniques.context.partial import Partial
from weft.techniques.core import _layout, autograd
from weft.techniques.data import gradient_reducer as data
from weft.techniques.expert import runtime as expert
from weft.techniques.offload import depot
from weft.techniques.pipeline import runtime as pipeline
from weft.techniques.pipeline.weight_pass import WeightPass, deferring
from weft.techniques.randomness import keyed_dropout as randomness
from weft.techniques.tensor.mesh_2d import norms as grid_norms
from weft.techniques.tensor.mesh_2d import square, summa
from weft.techniques.tensor.mesh_2d.cube import CubeGrid
from weft.techniques.tensor.mesh_2d.shape import GridCut
from weft.techniques.tensor.mesh_2d.square import SquareGrid
from weft.techniques.tensor.mesh_2d.summa import Gathered
from weft.techniques.zero import sharded_weights as zero3

Build = Callable[[Recipe], Blueprint]
Patch = tuple[Any, str, Any]
"""Owner, attribute, what stands there instead."""


def _dropped_all_reduce() -> list[Patch]:
    """Data ranks keep their own gradients."""
    return [(Collectives, "start_all_reduce", lambda self, flat, by=None: nothing_to_wait_for)]


def _last_bucket_not_reduced() -> list[Patch]:
    """As a bucket that was filled after its reduction had started."""
    launch = data.BucketReducer._launch

    def skip_last(store: Any, state: Any) -> None:
        if state is store._states[-1]:
            state.launched = True
            return
        launch(store, state)

    return [(data.BucketReducer, "_launch", skip_last)]


def _no_sum_over_model_axes() -> list[Patch]:
    """Partial gradients of norms under sequence parallelism, and the copies of a tie on two stages, are not summed."""
    return [(data.BucketReducer, "_sum_over_model", lambda store: None)]


def _untied_on_one_rank() -> list[Patch]:
    """The first and the last stage stand on one rank and do not share the tied Parameter."""
    return [(pipeline, "share_parameters", lambda parts: None)]


def _dropout_by_rank() -> list[Patch]:
    words = randomness.sample_words

    def by_rank(key: str, *of: Any) -> Tensor:
        return words(f"{key} of rank {dist.get_rank()}", *of)

    return [(randomness, "sample_words", by_rank)]


def _norm_counts_copies() -> list[Patch]:
    """The clip norm takes every copy of a replicated parameter for another parameter."""
    squares = _step.squared_norm
    return [(_step, "squared_norm", lambda shards: squares([replace(shard, counts=True) for shard in shards]))]


def _stale_weights() -> list[Patch]:
    """Gathered weights stay after the masters have changed."""
    return [
        (zero3.FullyShardedReducer, "start_weight_gather", lambda store: None),
        (zero3.FullyShardedReducer, "release", lambda store: None),
    ]


def _tie_inside_fully_shard() -> list[Patch]:
    """The native trap: a weight that two stages of one rank share is sharded with each of them."""
    share = pipeline.share_parameters

    def share_and_forget(parts: Any) -> None:
        share(parts)
        for part in parts:
            part.ties.clear()

    return [(pipeline, "share_parameters", share_and_forget)]


def _sizes_differ() -> list[Patch]:
    """The native trap: a data rank that did not use a parameter sends a smaller reduce-scatter than the others."""
    apply = zero3.apply_zero3

    def apply_without(part: Any, *args: Any, **settings: Any) -> None:
        apply(part, *args, **settings)
        part.module.set_reduce_scatter_unused_params(False)

    return [(zero3, "apply_zero3", apply_without)]


def _no_gradients_to_others() -> list[Patch]:
    """The trap of `torch.distributed.all_gather`: what was gathered has no gradient but for a rank's own samples."""
    return [(autograd, "reduce_scatter_shards", shard_of)]


def _wrong_offset() -> list[Patch]:
    """A rank takes the gradient of its neighbour's samples."""
    scatter = autograd.reduce_scatter_shards

    def shifted(whole: Tensor, view: Any, dim: int) -> Tensor:
        return scatter(whole.roll(whole.shape[dim] // view.size, dim), view, dim)

    return [(autograd, "reduce_scatter_shards", shifted)]


def _merged_as_means() -> list[Patch]:
    """Attention over some keys counts as much as over any others, whatever their scores."""

    def mean(one: Partial | None, other: Partial) -> Partial:
        merged = partial.merge(one, other)
        return merged if one is None else replace(merged, output=(one.output + other.output) / 2)

    return [(attention, "merge", mean)]


def _positions_from_zero() -> list[Patch]:
    """Every rank's tokens are counted from 0, as if they were a sequence of their own."""
    return [(context, "_give_positions", lambda *of: None)]


def _no_sum_over_context() -> list[Patch]:
    """Ranks that share a sequence keep the gradients of their own tokens."""
    return [(_layout, "BATCH_AXES", ("replicate", "shard"))]


def _keys_without_gradients_from_others() -> list[Patch]:
    """What other ranks' queries say of a rank's keys is lost."""

    def own(self: RingExchange, key: Tensor, value: Tensor, shown: Any, compute: Any) -> Any:
        said = [compute(*each, slice(0, key.shape[1])) for each in self.visit(key, value, shown)]
        return said[0]

    return [(RingExchange, "gradients", own)]


def _seen_by_share() -> list[Patch]:
    """Shares are taken to stand one behind the other: a rank's tail sees nothing of the shares of later ranks."""
    pairs = attention.Visibility.pairs

    def pairs_of(self: Any, source: int) -> Any:
        return () if source > self.view.index and self.form.pattern.causal else pairs(self, source)

    return [(attention.Visibility, "pairs", pairs_of)]


def _window_one_too_wide() -> list[Patch]:
    """Each token sees one more than its window holds."""
    pairs, scoring = attention.Visibility.pairs, attention.Visibility.scoring

    def wider(self: Any) -> Any:
        form, window = self.form, self.form.pattern.window
        if window is None:
            return self
        return replace(self, form=replace(form, pattern=replace(form.pattern, window=window + 1)))

    return [
        (attention.Visibility, "pairs", lambda self, source: pairs(wider(self), source)),
        (attention.Visibility, "scoring", lambda self, *of: scoring(wider(self), *of)),
        (attention.Visibility, "shown", property(lambda self: token_runs.Shown(self.tokens.length, self.view.size))),
    ]


def _neighbours_out_of_order() -> list[Patch]:
    """Tokens of ranks that exchange heads stay in the order of these ranks."""
    whole = ulysses._Whole
    begin = whole.__init__

    def unsorted(self: Any, *of: Any) -> None:
        begin(self, *of)
        self._by_position = self._by_rank = torch.arange(len(self._by_rank))

    return [(whole, "__init__", unsorted)]


def _one_place_for_all() -> list[Patch]:
    """What is offloaded lies on top of one another."""
    take = depot.Runs.take

    def first(self: depot.Runs, num_bytes: int) -> depot.Extent:
        return depot.Extent(self, 0, take(self, num_bytes).size)

    return [(depot.Runs, "take", first)]


def _another_ranks_experts() -> list[Patch]:
    """A rank keeps the experts of the rank behind it, and gets the tokens of its own."""

    def shifted(**of: Any) -> Any:
        return _layout.Split(**(of | {"index": (of["index"] + 1) % of["parts"]}))

    return [(expert, "Split", shifted)]


def _experts_summed_over(data_ranks: bool) -> list[Patch]:
    """Gradients of experts are summed with those of other experts, or not with those of the same ones elsewhere."""
    reducing = _layout.ParameterLayout.reducing

    def wrong(layout: Any, mesh: Any) -> Any:
        if "expert" not in layout.split_axes:
            return reducing(layout, mesh)
        return mesh["data"] if data_ranks else mesh.create_group([[rank] for rank in range(mesh.plan.world_size)], "")

    return [(_layout.ParameterLayout, "reducing", wrong)]


def _experts_cut_over_all_shards() -> list[Patch]:
    """ZeRO-3 gathers experts from ranks that have other ones."""
    cut_of = zero3.cut_of

    def wrong(layout: Any, mesh: Any) -> Any:
        cut = cut_of(layout, mesh)
        return cut and zero3.ShardCut("shard", mesh["shard"], cut.dim)

    return [(zero3, "cut_of", wrong)]


def _neighbours_part_of_experts() -> list[Patch]:
    """Where ZeRO-3 cuts experts' matrices, a rank fills and saves the part of the rank behind it."""
    place = zero3.ShardCut.place

    def wrong(self: Any, layout: Any, shape: Any) -> Any:
        placed, start = place(self, layout, shape)
        inner = placed.inner
        return placed if inner is None else replace(
            placed, inner=replace(inner, index=(inner.index + 1) % inner.parts)
        ), start

    return [(zero3.ShardCut, "place", wrong)]


def _no_sum_over_depth() -> list[Patch]:
    """As in the one public implementation of 2.5 dimensions: layers of a grid keep the gradients of their samples."""
    split_of = SquareGrid.split_of

    def unsummed(self: SquareGrid, cut: GridCut) -> Any:
        split = split_of(self, cut)
        return replace(split, is_partial=False) if cut.is_matrix else split

    return [(SquareGrid, "split_of", unsummed)]


def _weights_from_the_row() -> list[Patch]:
    """Blocks of a weight are gathered along the row of the grid, as those of activations are."""
    product = summa.product

    def along_row(whole: Tensor, x: Tensor, weight: Tensor, bias: Any, gathered: Gathered, *of: Any) -> Tensor:
        return product(whole, x, weight, bias, gathered, gathered.view, of[1])

    return [(square, "product", along_row)]


def _layouts_that_stay() -> list[Patch]:
    """Both products of a layer of a cube gather and sum along the same lines."""
    enter, multiply = CubeGrid.enter, CubeGrid.multiply

    def entered(self: CubeGrid, x: Tensor, *, is_inside: bool) -> Any:
        return enter(self, x, is_inside=False)

    def multiplied(self: CubeGrid, *given: Any) -> Tensor:
        return multiply(self, *given[:-1], "column")

    return [(CubeGrid, "enter", entered), (CubeGrid, "multiply", multiplied)]


def _norms_by_part() -> list[Patch]:
    """A norm takes its statistics from the features of its rank."""
    return [(grid_norms, "all_reduce", lambda tensor, view: tensor.mul_(view.size))]


def _copies_not_summed() -> list[Patch]:
    """Gradients of norms and biases are those of a rank's own samples."""
    split_of = SquareGrid.split_of

    def unsummed(self: SquareGrid, cut: GridCut) -> Any:
        split = split_of(self, cut)
        return split if cut.is_matrix else replace(split, is_partial=False)

    return [(SquareGrid, "split_of", unsummed)]


def _auxiliary_by_rank() -> list[Patch]:
    """The load of experts is that of a rank's own tokens."""
    from weft.techniques.data import auxiliary

    return [(auxiliary, "all_reduce", lambda mine, view: mine)]


def _choices_by_rank() -> list[Patch]:
    """Biases follow what a rank's own tokens chose."""
    from weft.techniques.core import routing

    return [(routing.dist, "all_reduce", lambda *of, **more: None)]


def _part_of_the_choices_weights() -> list[Patch]:
    """A router hears only of this rank's part of its experts what its choices are worth."""
    from weft.techniques.tensor import mixtures

    return [(mixtures, "_sum_weights", lambda view, module, args, routing: routing)]


def _router_counted_by_ranks() -> list[Patch]:
    """What all ranks compute alike of a router's input is summed as if each had a part."""
    from weft.techniques.tensor import mixtures

    return [(mixtures, "_divide", lambda ranks, module, args: args)]


def _swapped_experts() -> list[Patch]:
    """Every expert is handed the rows of its neighbour."""
    from weft.model.reference import mixture

    arrange = mixture.arrange

    def swapped(chosen: Tensor, num_experts: int) -> Any:
        return arrange((chosen + 1) % num_experts, num_experts)

    return [(mixture, "arrange", swapped)]


def _mean_of_means(blueprint: Blueprint) -> Blueprint:
    """Each microbatch is divided by its own count of tokens, and then the means are averaged."""
    loss = blueprint.loss

    def mean(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        total, count = loss(outputs, batch)
        return total / count, count / count

    return replace(blueprint, loss=mean)


def _without_localised_heads(blueprint: Blueprint) -> Blueprint:
    """The native trap: projections are split, and attention still counts the heads of the whole model."""
    return replace(blueprint, localise=())


PATCHES: Mapping[str, Callable[[], list[Patch]]] = {
    "dropped all-reduce": _dropped_all_reduce,
    "last bucket not reduced": _last_bucket_not_reduced,
    "no sum over model axes": _no_sum_over_model_axes,
    "untied on one rank": _untied_on_one_rank,
    "dropout by rank": _dropout_by_rank,
    "norm counts copies": _norm_counts_copies,
    "stale weights": _stale_weights,
    "tie inside fully_shard": _tie_inside_fully_shard,
    "sizes differ": _sizes_differ,
    "samples without gradients to others": _no_gradients_to_others,
    "samples from another rank's offset": _wrong_offset,
    "merged as means": _merged_as_means,
    "positions from zero": _positions_from_zero,
    "no sum over context": _no_sum_over_context,
    "keys without gradients from others": _keys_without_gradients_from_others,
    "seen by share": _seen_by_share,
    "window one too wide": _window_one_too_wide,
    "neighbours out of order": _neighbours_out_of_order,
    "auxiliary loss by rank": _auxiliary_by_rank,
    "choices by rank": _choices_by_rank,
    "part of the choices' weights": _part_of_the_choices_weights,
    "router counted by ranks": _router_counted_by_ranks,
    "swapped experts": _swapped_experts,
    "one place for all": _one_place_for_all,
    "another rank's experts": _another_ranks_experts,
    "experts summed over nobody": partial_of(_experts_summed_over, False),
    "experts summed over all data ranks": partial_of(_experts_summed_over, True),
    "experts cut over all shards": _experts_cut_over_all_shards,
    "neighbour's part of experts": _neighbours_part_of_experts,
    "no sum over depth": _no_sum_over_depth,
    "weights from the row": _weights_from_the_row,
    "norms by part": _norms_by_part,
    "layouts that do not change places": _layouts_that_stay,
    "copies of norms not summed": _copies_not_summed,
    **channel_breakages.PATCHES,
    **dispatcher_breakages.PATCHES,
    **token_breakages.PATCHES,
    **scored_breakages.PATCHES,
}
BLUEPRINTS: Mapping[str, Callable[[Blueprint], Blueprint]] = {
    "mean of means": _mean_of_means,
    "heads not localised": _without_localised_heads,
}


@contextmanager
def entered(name: str) -> Iterator[Build]:
    """Break the named piece of this process, and mend it afterwards: the pool's ranks live on."""
    if name in BLUEPRINTS:
        yield lambda recipe: BLUEPRINTS[name](build_model(recipe))
        return
    patches = PATCHES[name]()
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in patches]
    for owner, attribute, instead in patches:
        setattr(owner, attribute, instead)
    try:
        yield build_model
    finally:
        for owner, attribute, original in before:
            setattr(owner, attribute, original)


def split_backward_under_ddp() -> dict[str, Tensor]:
    """Weight gradients of a linear layer under DDP on this rank, the backward split natively and by Weft."""
    found: dict[str, Tensor] = {}
    for kind in ("native", "weft"):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2, bias=False)
        model = nn.parallel.DistributedDataParallel(layer)
        samples = torch.randn(5, 3, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
        if kind == "native":
            loss = model(samples).square().sum()
            torch.autograd.grad(loss, samples, retain_graph=True)
            (layer.weight.grad,) = torch.autograd.grad(loss, layer.weight)
        else:
            later = WeightPass()
            with deferring(later):
                model(samples).square().sum().backward()
            later.run()
        assert layer.weight.grad is not None
        found[kind] = layer.weight.grad.clone()
    return found
