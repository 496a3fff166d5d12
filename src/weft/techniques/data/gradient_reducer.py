"""Data parallelism with ZeRO-0, 1 and 2 on Weft's own buckets.

What is at rest per parameter, with Ψ parameters, N data ranks and AdamW (Rajbhandari et al., arXiv 1910.02054, §5):

    stage   weights   gradients   masters and moments
    0       all       all         all
    1       all       all         1/N
    2       all       1/N         1/N

The N ranks of a parameter are those that, as its layout says, hold the same part of it and see other samples or tokens.

Gradients accumulate straight into flat storages, which lie in the memory that ranks of one host share where the group
has such: reductions then read them where they are.  A bucket is reduced as soon as backward has completed its last
member in the step's last microbatch, while backward goes on; buckets start strictly in one order that all data ranks
share, because a parameter that only some ranks used must not make their collectives cross.  After the first step that
order is the one in which the first data rank's buckets became ready.

Updated weights are gathered behind the next forward (`_weight_prefetch`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm.mesh import GroupView, Mesh
from weft.comm.pick import collectives_for
from weft.comm.reduce import nothing_to_wait_for, start_all_reduce
from weft.comm.shared_memory import shared_memory_group
from weft.comm.watched_group import hold
from weft.config.plan import BATCH_AXES
from weft.techniques.buckets.bucket_state import (
    BucketMember,
    BucketState,
    GradientHook,
    check_alone,
    compose_buckets,
)
from weft.techniques.buckets.settings import BucketSettings
from weft.techniques.core._shard import CheckpointShard, Shard
from weft.techniques.data._weight_prefetch import await_all
from weft.techniques.data.bucket_storage import BucketStorage

if TYPE_CHECKING:
    from weft.techniques.compression.codecs import CodecSpec

_IN_FLIGHT = 2
"""ZeRO-2: reductions that may run while backward fills the next bucket; older ones are waited for and their storage
freed."""


class BucketReducer:
    """Owns gradients, weights and masters of all parameters in buckets.  Create it on every rank with the same plan.

    `stage` is the ZeRO stage: 0, 1 or 2.  The model computes in `compute_dtype`; under bf16 and fp16 the masters are
    fp32, and the weights are cast from them once per step.  Gradients accumulate and are summed in `gradient_dtype`.
    ZeRO-2 reduces in the last `reduce_rounds` microbatches of a step (`reduction_rounds`); the other stages reduce in
    one.  Reductions and gathers use the plan's `algorithm`.  `compression` applies to the members that `compressible`
    accepts.
    """

    def __init__(
        self,
        members: Sequence[BucketMember],
        mesh: Mesh,
        *,
        stage: Literal[0, 1, 2],
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        cuts: Literal["anywhere", "parameter"] = "anywhere",
        bucket_limits: tuple[int, int] = BucketSettings().bucket_limits,
        reduce_rounds: int = 1,
        compression: CodecSpec | None = None,
        algorithm: str = "auto",
    ) -> None:
        self._everyone = mesh.group_over(BATCH_AXES)
        """All ranks that reduce something with one another.  They must start their reductions in one order."""
        self._stage = stage
        self._storage = BucketStorage(stage, compute_dtype, gradient_dtype, compression)
        self._reduce_rounds = reduce_rounds
        self._round = 0
        self._armed: set[int] = set()
        self._used_elsewhere: set[str] = set()
        """Names of tied parameters that another pipeline stage has used in this step."""
        self._compression = compression
        buckets = compose_buckets(
            members,
            sharded=stage > 0,
            cuts=cuts,
            limits=bucket_limits,
            compressed=self._storage.compressible(mesh),
        )
        views = dict.fromkeys(bucket.key.reducing for bucket in buckets)
        self._collectives = {view: collectives_for(view, mesh.device, algorithm) for view in views}
        self._states = [self._storage.allocate(bucket, self._collectives[bucket.key.reducing]) for bucket in buckets]
        if stage < 2:
            for state in self._states:
                self._attach_all(state)
        # Buckets are composed from the last parameter to the first, so their index is the expected order of readiness.
        self._order = list(range(len(self._states)))
        self._gather_order = self._order
        self._is_ahead = False
        self._ready_order: list[int] | None = []
        self._next = 0
        self._handles = [
            member.parameter.register_post_accumulate_grad_hook(GradientHook(weakref.ref(self), index, position))
            for index, state in enumerate(self._states)
            for position, member in enumerate(state.bucket.members)
        ]
        self.start_weight_gather()

    def gather_ahead(self, parts: Sequence[nn.Module], blocks: Sequence[str]) -> None:
        """From now on `start_weight_gather` returns while gathers are under way; forwards of `parts` wait for the
        weights that they read.

        `blocks` are the names of the parts' blocks, which must run as modules, and be the only ones to read their
        weights, until the part's forward ends.  Not for blocks that are compiled: hooks do not go with that.
        """
        if self._stage == 0 or self._everyone.group is None:
            return
        bucket_of = {id(m.parameter): index for index, state in enumerate(self._states) for m in state.bucket.members}
        handles, first = await_all(self, parts, blocks, bucket_of)
        self._handles += handles
        # Backward fills buckets from the head of the model, and forward reads from the other end: gathers go by the
        # forward's need, so that the first block can start after the first gather and not after the last.
        self._gather_order = list(dict.fromkeys([*first, *self._order]))
        self._is_ahead = True

    # ── where gradients lie ───────────────────────────────────────────────────────────────────────────────────────────

    def _attach_all(self, state: BucketState) -> None:
        """ZeRO-0 and 1: gradients are views of one storage for good, and autograd adds into it."""
        state.lasting = [member.seen(view) for member, view in state.bucket.views(self._storage.new_gradients(state))]
        state.adopted = set(range(len(state.bucket.members)))
        self._attach_again(state)

    def _attach_again(self, state: BucketState) -> None:
        """Put the views back that the loop has replaced since (`model.zero_grad()` sets gradients to None)."""
        for member, view in zip(state.bucket.members, state.lasting, strict=True):
            if member.parameter.grad is not view:
                member.parameter.grad = view

    def _adopt(self, state: BucketState, position: int) -> None:
        """ZeRO-2: move a gradient that autograd has just made into the bucket's storage.

        That storage lives from the first gradient of a bucket to its reduction, so full gradients exist for a few
        buckets at a time only.
        """
        member = state.bucket.members[position]
        parameter = member.parameter
        if state.lasting and parameter.grad is not state.lasting[position] and parameter.grad is not None:
            # The loop set the gradient to None in the middle of a step, and autograd has made a new tensor.
            state.lasting[position].add_(parameter.grad)
            parameter.grad = state.lasting[position]
        if position in state.adopted or parameter.grad is None:
            return
        flat = state.gradients if state.gradients is not None else self._storage.new_gradients(state)
        view = member.seen(state.bucket.view(flat, position))
        view.copy_(parameter.grad)
        parameter.grad = view  # later microbatches of this round accumulate into the bucket directly
        state.adopted.add(position)

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def shards(self) -> Sequence[Shard]:
        return [state.shard for state in self._states]

    def begin_step(self) -> None:
        self._round = 0
        self._used_elsewhere.clear()
        self._armed.clear()
        for state in self._states:
            state.used.clear()
            state.shard.gradient = None
            if state.reduction is not None:
                state.reduction.begin_step()
            if state.kept is not None:
                state.kept.zero_()
                self._forget(state)  # a backward outside of a step must not leak into this one
            elif state.gradients is not None:
                state.gradients.zero_()
                self._attach_again(state)
        self._begin_round()

    def _begin_round(self) -> None:
        self._next = 0
        for state in self._states:
            state.pending = set(range(len(state.bucket.members)))
            state.launched = state.reduced = False

    def on_backward(self, part: int, remaining: int) -> None:
        """Nothing to do: hooks tell which gradients are complete."""

    def on_last_forward(self, part: int) -> None:
        self._armed.add(part)

    def on_microbatch(self, remaining: int) -> None:
        """See `GradientReducer`.  ZeRO-2 reduces in each of the last rounds."""
        if self._stage != 2 or remaining >= self._reduce_rounds:
            return
        if self._round > 0:
            # The last round's reductions end here at the latest: their storages are needed again for this one.
            self._complete_round()
            self._begin_round()
        self._round += 1
        self._armed.update(state.bucket.key.part for state in self._states)

    @property
    def takes_back(self) -> bool:
        return self._compression is None

    def take_back(self) -> None:
        self._armed.clear()
        self._round = 0
        if any(state.launched for state in self._states):
            # Some buckets are summed already.  All are completed, so that ranks keep one order of collectives; then
            # one rank alone keeps a sum, because the next reduction adds what every rank has.
            self._complete_round()
            for state in self._states:
                state.keep_one_addend(self._storage.region(state.bucket) if self._stage else None)
        self._begin_round()

    def on_gradient(self, index: int, position: int, parameter: Tensor) -> None:
        """Autograd has added to the gradient of a bucket's member."""
        state = self._states[index]
        state.used.add(position)
        if not state.lasting or parameter.grad is not state.lasting[position]:  # ZeRO-2, or a replaced gradient
            self._adopt(state, position)
        if not self._armed or state.bucket.key.part not in self._armed:
            return
        if state.launched:
            check_alone(state.bucket, position)
            return
        state.pending.discard(position)
        if not state.pending:
            if self._ready_order is not None and index not in self._ready_order:
                self._ready_order.append(index)
            self._launch_ready()

    def on_last_backward(self, part: int) -> None:
        """Count every member of the part as ready: some had no gradient, and some schedules fire no hooks."""
        # Under ZBV the post-accumulate hooks fired 0 to 40 of 72 times (docs/lab-notes/tensor-and-pipeline.md), so the
        # hooks may only hasten a reduction, and this call decides.
        self._armed.add(part)
        for state in self._states:
            if state.bucket.key.part == part:
                state.pending.clear()
        self._launch_ready()

    def _launch_ready(self) -> None:
        while self._next < len(self._order):
            state = self._states[self._order[self._next]]
            # A ready bucket waits for those before it.  A rank on which a parameter is unused would otherwise start
            # its buckets in another order than its peers, and their collectives would meet crosswise.
            if state.pending:
                return
            self._launch(state)
            if self._next > 0:
                # The second exchange of a compressed bucket starts now: while this one filled, the first had time.
                self._states[self._order[self._next - 1]].advance()
            self._next += 1
            if self._stage == 2 and self._next > _IN_FLIGHT:
                # Full gradients then exist for these buckets and the one that fills, however deep the model is.
                self._wait_reduction(self._states[self._order[self._next - 1 - _IN_FLIGHT]])

    def _launch(self, state: BucketState) -> None:
        if not state.lasting or len(state.used) < len(state.bucket.members):
            # Gradients that no hook has reported: made outside of this backward, or under a schedule without hooks.
            for position in range(len(state.bucket.members)):
                self._adopt(state, position)
        flat = state.gradients if state.gradients is not None else self._storage.new_gradients(state)
        state.launched = True
        if state.reduction is not None:
            state.wait = state.reduction.start(flat)
        elif self._stage == 0:
            state.wait = state.collectives.start_all_reduce(flat)
        else:
            state.wait = state.collectives.start_reduce_scatter(flat, state.bucket.regions, even=state.bucket.even)

    def _wait_reduction(self, state: BucketState) -> None:
        """Wait for a bucket's reduction; under ZeRO-2 add this rank's region to what it keeps and free the rest."""
        if state.reduced:
            return
        assert state.launched, "a bucket was never reduced"
        state.wait()
        state.wait, state.reduced = nothing_to_wait_for, True  # drops the wait's tensors
        if state.kept is None or state.gradients is None:
            return
        start, stop = self._storage.region(state.bucket)
        state.kept.add_(state.gradients[start:stop])
        self._forget(state)

    def _forget(self, state: BucketState) -> None:
        """Drop the storage of all gradients of a bucket."""
        state.gradients, state.lasting = None, ()
        state.adopted.clear()
        for member in state.bucket.members:
            member.parameter.grad = None

    def _complete_round(self) -> None:
        for state in self._states:
            state.pending.clear()
        self._launch_ready()
        for index in self._order:
            self._wait_reduction(self._states[index])

    def finish(self) -> None:
        self.wait_weights()  # a part that computed nothing has not waited for its weights
        self._complete_round()
        for state in self._states:
            if state.kept is not None:
                state.shard.gradient = state.kept
            else:
                assert state.gradients is not None
                start, stop = self._storage.region(state.bucket)
                state.shard.gradient = state.gradients[start:stop]
        # After the sum over data ranks: under ZeRO a rank's region is 1/N of the bucket by now, and so are the bytes.
        self._sum_over_model()
        if self._armed:
            self._agree_on_order()
        self._armed.clear()  # a backward before the next step is no part of this one

    def _sum_over_model(self) -> None:
        """Sum the parts of a gradient that ranks with the same tokens have, and the copies of tied weights.

        The ranks of a stage have the same buckets, and go in their order.  Stages hold other buckets and have other
        orders of readiness, so tied weights go by name.
        """
        for state in self._states:
            for view in state.bucket.key.completing:
                assert state.shard.gradient is not None
                start_all_reduce(state.shard.gradient, view)()
        for state in sorted(self._states, key=lambda state: state.bucket.key.tie):
            tie = state.bucket.members[0].tie
            if tie is not None:
                assert state.shard.gradient is not None
                start_all_reduce(state.shard.gradient, tie)()
                self._agree_on_use(state, tie)

    def _agree_on_use(self, state: BucketState, tie: GroupView) -> None:
        """Learn which tied parameters another stage has used: one is unused only where no holder used it."""
        names = [member.layout.name for member in state.bucket.members]
        unused = self.unused()
        used = torch.tensor([float(name not in unused) for name in names], device=state.weights.device)
        start_all_reduce(used, tie)()
        self._used_elsewhere.update(name for name, users in zip(names, used.tolist(), strict=True) if users)

    def _agree_on_order(self) -> None:
        """Take the first rank's order of readiness for all later steps, once, after the first full step.

        Collective over the data ranks the first time.
        """
        if self._ready_order is None:
            return
        # Backward reaches parameters in the order of the graph, not of registration: a bucket that fills late must not
        # hold up those behind it.  torch's DDP rebuilds its buckets for this; the order alone is enough here.
        seen = self._ready_order + [index for index in self._order if index not in self._ready_order]
        self._ready_order = None
        if self._everyone.group is None or not seen:
            self._order = seen
            return
        agreed = torch.tensor(seen, dtype=torch.int64, device=self._states[0].weights.device)
        dist.broadcast(agreed, src=self._everyone.ranks[0], group=self._everyone.group)
        self._order = [int(index) for index in agreed.tolist()]

    # ── after the step ────────────────────────────────────────────────────────────────────────────────────────────────

    def on_applied(self, skipped: Collection[str]) -> None:
        for state in self._states:
            if state.reduction is not None:
                state.reduction.keep(skipped)

    def checkpoint_shards(self) -> list[CheckpointShard]:
        if self._compression is None:
            return []
        from weft.techniques.compression.reduction import residual_shards

        return residual_shards(self._states)

    def start_weight_gather(self) -> None:
        self.wait_weights()
        for index in self._gather_order:
            state = self._states[index]
            state.shard.write_weights()  # the cast from master to compute dtype, of this rank's region
            if self._stage > 0:
                bucket = state.bucket
                gather = state.collectives.start_all_gather(state.weights, bucket.regions, even=bucket.even)
                state.gather = hold(bucket.key.reducing.group, gather)
                if self._is_ahead:
                    # A forward that reads too early then fails by shape, instead of computing with last step's weights.
                    state.drop_parameters()
        if not self._is_ahead:
            self.wait_weights()

    def wait_weights(self) -> None:
        self.wait_buckets(self._gather_order)

    def wait_buckets(self, indices: Iterable[int]) -> None:
        """Return when the weights of these buckets are gathered."""
        for index in indices:
            state = self._states[index]
            if state.gather is None:
                continue
            state.gather()
            state.gather = None
            for member, weights in zip(state.bucket.members, state.gathered, strict=bool(state.gathered)):
                member.parameter.data = weights
            state.gathered = ()

    def release(self) -> None:
        """Wait for the gathers under way.  Nothing is dropped: these weights stay unsharded."""
        self.wait_weights()

    def names(self) -> frozenset[str]:
        return frozenset(member.layout.name for state in self._states for member in state.bucket.members)

    def unused(self) -> frozenset[str]:
        if all(len(state.used) == len(state.bucket.members) for state in self._states):
            return frozenset()
        used = {state.bucket.members[position].layout.name for state in self._states for position in state.used}
        return self.names() - used - self._used_elsewhere

    def model_state_bytes(self) -> dict[str, int]:
        total: Counter[str] = Counter(parameters=0, gradients=0, masters=0, residuals=0)
        for state in self._states:
            total.update(state.state_bytes(only_kept=self._stage == 2))
        return dict(total)

    def close(self) -> None:
        """Take the hooks out of the model, and end the thread of collectives by messages if there is one.

        Gradients in memory that ranks share are dropped: the model would keep the group's memory alive with them.
        """
        try:
            self.wait_weights()
        finally:
            for handle in self._handles:
                handle.remove()
            for collectives in self._collectives.values():
                collectives.close()
            for state in self._states:
                if shared_memory_group(state.bucket.key.reducing.group) is not None:
                    state.shard.gradient = None
                    self._forget(state)
