"""One optimizer step: forward and backward of all microbatches, one agreement of all ranks, one update.

The backward runs on `loss sum × scale` with a `scale` that every rank knows beforehand; the true global count of
tokens (or samples) arrives with the step's single world-wide all-reduce, and the remaining factor is folded into the
optimizer. So the mean is exact under padding, accumulation and unequal shares, and no rank waits for a count before it
can start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.device import peak_memory_bytes
from weft.comm.mesh import GroupView, Mesh
from weft.comm.telemetry import Recorder
from weft.events import StepEvent
from weft.model.blueprint import Batch
from weft.run.engine._loss_scale import LossScale
from weft.run.engine.optimizers import ShardOptimizer, squared_sum
from weft.techniques.core import LossTotals, ReducerSet, Runner, Shard
from weft.techniques.runtime import TechniqueRuntime

if TYPE_CHECKING:
    from weft.run.engine._average import WeightAverage
    from weft.techniques.core.routing import RouterWatch


_MEMORY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _AgreedSums:
    """Sums over the world.  The first three have one entry per replica that steps by itself; else one entry in all."""

    loss_sums: Sequence[float]
    counts: Sequence[float]
    squares: Sequence[float]
    """Sum of squares of all gradient elements, before the correction of the scale."""
    unused: float
    """Number of parameters without a gradient, counted on every rank that holds them."""
    stop: float
    """Number of ranks that were asked to stop."""
    memory_bytes: int
    """Largest peak memory of any rank."""
    fingerprints: Sequence[float]
    """Fingerprint of each rank; none where none was given."""


@dataclass(slots=True)
class ReducedGradients:
    """Reduced gradients on the shards, before the update.  Times `factor` they are the gradient of the mean loss."""

    agreed: _AgreedSums
    factors: list[float]
    norms: list[float]
    """Norm of the gradient of the mean loss, before clipping; where replicas step by themselves, by replica."""
    replica: int
    scale: float
    auxiliary: Mapping[str, float]

    @property
    def factor(self) -> float:
        return self.factors[self.replica]

    @property
    def norm(self) -> float:
        return self.norms[self.replica]

    def scaled(self, by: float) -> None:
        """Apply this rank's gradients times a number, as clipping does; `norms` stay what they were."""
        self.factors[self.replica] *= by


class Stepper:
    """Runs training steps on one rank.  Create and call on every rank alike."""

    def __init__(
        self,
        *,
        runner: Runner,
        stores: ReducerSet,
        optimizer: ShardOptimizer,
        mesh: Mesh,
        seed: int,
        nominal_count: float,
        max_gradient_norm: float | None,
        loss_scale: LossScale | None,
        average: WeightAverage | None,
        summing: Mesh,
        techniques: Sequence[TechniqueRuntime] = (),
        recorder: Recorder,
        buffers: Sequence[Tensor] = (),
        routing: RouterWatch | None = None,
    ) -> None:
        """Join the parts.  `summing` is the mesh over whose data ranks gradients are summed: the whole, or as one of
        several replicas sees it.  `buffers` are those that a forward changes (running statistics): a step that is
        skipped puts them back, so that a single NaN does not stay in them for good."""
        self._runner = runner
        self._stores = stores
        self._optimizer = optimizer
        self._mesh = mesh
        self._world: GroupView = mesh["world"]
        self._seed = seed
        self._nominal_count = nominal_count
        self._max_gradient_norm = max_gradient_norm
        self._loss_scale = loss_scale
        self._average = average
        self._ending = [technique for technique in techniques if technique.span]
        self.num_replicas = mesh.size("data") // summing.size("data")
        """Replicas that step by themselves; 1 where all ranks take every step together."""
        self._replica = mesh.index("replicate") if self.num_replicas > 1 else 0
        self._summing = summing.within_stage
        self._recorder = recorder
        self._buffers = tuple(buffers)
        self._before: list[Tensor] = []
        self._routing = routing
        self._show_gradients: Callable[[float], None] | None = None
        self._memory, self._memory_read = 0, -math.inf
        self.num_skipped = 0
        """Steps whose update was left out, since the start of the run."""

    def __call__(
        self,
        microbatches: Sequence[Batch],
        *,
        step: int,
        learning_rate: float,
        stop_requested: Callable[[], float] = lambda: 0.0,
        fingerprint: float | None = None,
        on_difference: Callable[[], None] = lambda: None,
        asks_routing: bool = False,
    ) -> StepEvent:
        """Train on this data rank's microbatches of `step`.  Call on every rank.

        `fingerprint`, a whole number below 2**53, must be equal on all ranks; else `on_difference` is called on all of
        them, before anything is updated.  `asks_routing`: the result tells of the routers of mixtures; equal on all
        ranks.
        """
        scale = self.begin(step, asks_routing=asks_routing)
        with self._recorder.span("forward_backward"):
            totals = self._runner.forward_backward(
                microbatches, step=step, seed=self._seed, scale=scale, observer=self._stores
            )
        return self.end(
            totals,
            step=step,
            learning_rate=learning_rate,
            stop_requested=stop_requested,
            fingerprint=fingerprint,
            on_difference=on_difference,
        )

    def begin(self, step: int, *, asks_routing: bool = False, seeds: bool = True) -> float:
        """Begin a step whose gradients the caller computes, and return the scale of the loss.  Call on every rank.

        The caller adds the gradients of (sum of losses × scale) to the parameters, and then calls `end`, or `reduce`
        and `apply`, or `abandon`.  Without `seeds` torch's generator goes on as it is.
        """
        if seeds:
            seed_step(self._seed, step, self._mesh.index("data"), self._mesh.device)
        self._before = [buffer.clone() for buffer in self._buffers]
        self._stores.begin_step()
        if self._routing is not None:
            self._routing.begin_step(asked=asks_routing)
        return self._scale / self._nominal_count

    def abandon(self) -> None:
        """Leave a step that has begun without its update: what forwards have changed is put back."""
        for buffer, kept in zip(self._buffers, self._before, strict=bool(self._before)):
            buffer.copy_(kept)
        self._before = []

    @contextmanager
    def gradients_shown(self, look: Callable[[float], None]) -> Generator[None]:
        """Call `look(factor)` within, in every step whose gradients are reduced and not applied yet: what the shards
        hold, times the factor, is the gradient of the mean loss before clipping."""
        self._show_gradients = look
        try:
            yield
        finally:
            self._show_gradients = None

    @property
    def _scale(self) -> float:
        return self._loss_scale.scale if self._loss_scale is not None else 1.0

    def end(
        self,
        totals: LossTotals,
        *,
        step: int,
        learning_rate: float,
        stop_requested: Callable[[], float] = lambda: 0.0,
        fingerprint: float | None = None,
        on_difference: Callable[[], None] = lambda: None,
    ) -> StepEvent:
        """Reduce the gradients, agree and update; see `__call__`.  Call on every rank."""
        reduced = self.reduce(totals, stop_requested(), fingerprint, on_difference)
        return self.apply(reduced, step=step, learning_rate=learning_rate)

    def reduce(
        self,
        totals: LossTotals,
        stop: float = 0.0,
        fingerprint: float | None = None,
        on_difference: Callable[[], None] = lambda: None,
    ) -> ReducedGradients:
        """Reduce the gradients and agree.  Call on every rank; `apply` follows."""
        scale = self._scale
        # The reductions of buckets were started by the backward.  The agreement comes after the last of them has ended,
        # because it carries the squares of the reduced gradients; it is small, and costs its latency alone.
        with self._recorder.span("reduce_wait"):
            self._stores.finish()
            agreed = self._agree(totals, stop, fingerprint)
        if len(set(agreed.fingerprints)) > 1:
            self.abandon()
            on_difference()
        # The backward ran on loss sum × scale / nominal count, since the true count was not known yet.  This factor
        # turns that gradient into the one of loss sum / true count; if nothing counts, it must not divide by zero.
        factors = [self._nominal_count / ((count or 1.0) * scale) for count in agreed.counts]
        norms = [
            math.sqrt(squares) * factor if squares >= 0 else math.nan
            for squares, factor in zip(agreed.squares, factors, strict=True)
        ]
        return ReducedGradients(agreed, factors, norms, self._replica, scale, totals.auxiliary)

    def apply(self, reduced: ReducedGradients, *, step: int, learning_rate: float) -> StepEvent:
        """Update by what `reduce` has returned, or leave out a step whose gradients are not finite."""
        agreed, norms = reduced.agreed, reduced.norms
        loss_sum, count = sum(agreed.loss_sums), sum(agreed.counts)
        # Every rank has the same sums, so every rank takes the same branch: no rank skips a step that others take.
        finite = all(map(math.isfinite, norms)) and math.isfinite(loss_sum)
        with self._recorder.span("optimizer"):
            if finite and agreed.counts[self._replica] > 0:
                clip = self._clip(reduced.norm)
                if self._show_gradients is not None:
                    self._show_gradients(reduced.factor)
                self._update(learning_rate, reduced.factor * clip, agreed.unused > 0)
                self._before = []
            else:
                self.abandon()
            if self._loss_scale is not None:
                self._loss_scale.update(finite)
        for technique in self._ending:
            with self._recorder.span(technique.span):
                if technique.end_step(step, agreed.counts if finite else None):
                    self._stores.gather_weights()
        skipped = not finite or count == 0
        routing = {} if self._routing is None else self._routing.end_step(applied=not skipped)
        self.num_skipped += skipped
        return StepEvent(
            step=step + 1,
            loss=loss_sum / count if count else math.nan,
            count=count,
            gradient_norm=_largest(norms),
            learning_rate=learning_rate,
            skipped=skipped,
            num_skipped=self.num_skipped,
            loss_scale=reduced.scale,
            stop=agreed.stop > 0,
            memory_bytes=agreed.memory_bytes,
            some_unused=agreed.unused > 0,
            auxiliary=reduced.auxiliary,
            load={name: report.load for name, report in routing.items()},
            router_entropy={name: report.entropy for name, report in routing.items()},
        )

    def _clip(self, norm: float) -> float:
        """The factor of `torch.nn.utils.clip_grad_norm_`."""
        if self._max_gradient_norm is None:
            return 1.0
        return min(1.0, self._max_gradient_norm / (norm + 1e-6))

    def _agree(self, totals: LossTotals, stop: float, fingerprint: float | None) -> _AgreedSums:
        """Exchange all numbers of the step by its one world-wide all-reduce, a sum of fp64 slots.

        With R replicas that step by themselves (else R = 1), and N ranks, every rank sends

            [ loss sum ×R | count ×R | Σ squares ×R | unused | stop | memory ×N | fingerprint ×N, if asked for ]

        A rank fills the slots of its own replica and of its own rank, and leaves zeros in the others.  So sums over a
        replica's ranks, sums over the world, and values by rank come out of one sum: the maximum of the memories needs
        no second collective, and unequal fingerprints can be seen on every rank.
        """
        replicas, size = self.num_replicas, self._world.size
        slots = 3 * replicas + 2 + size * (1 if fingerprint is None else 2)
        # fp64: a fingerprint below 2**53 and a count of bytes stay exact, and the sum of squares keeps its digits.
        mine = torch.zeros(slots, dtype=torch.float64, device=self._mesh.device)
        by_replica = mine[: 3 * replicas].view(3, replicas)[:, self._replica]
        by_replica[:2] = totals.addend(self._mesh)
        by_replica[2] = squared_norm(self._stores.shards)
        mine[3 * replicas] = float(len(self._stores.unused()))  # if the sum is not 0, `_update` asks for the names
        mine[3 * replicas + 1] = stop
        mine[3 * replicas + 2 + self._world.index] = float(self._peak_memory())
        if fingerprint is not None:
            mine[3 * replicas + 2 + size + self._world.index] = fingerprint
        if self._world.group is not None:
            dist.all_reduce(mine, group=self._world.group)
        sums = mine.tolist()  # waits for the device: clipping, and the choice to skip, are made on the host
        unused, stop, *by_rank = sums[3 * replicas :]
        loss_sums, counts, squares = (sums[kind * replicas : (kind + 1) * replicas] for kind in range(3))
        return _AgreedSums(loss_sums, counts, squares, unused, stop, int(max(by_rank[:size])), by_rank[size:])

    def _peak_memory(self) -> int:
        """The most memory that this rank ever held, as of at most a tenth of a second ago: to ask a process on the CPU
        takes 1 % of a step of 5 ms."""
        if (now := time.monotonic()) - self._memory_read > _MEMORY_SECONDS:
            self._memory, self._memory_read = peak_memory_bytes(self._mesh.device), now
        return self._memory

    def _update(self, learning_rate: float, gradient_scale: float, some_unused: bool) -> None:
        # Which parameters nobody used is asked by a second collective, and only where the first has counted some:
        # models without such parameters never pay for it.
        skipped = self._unused_everywhere() if some_unused else frozenset[str]()
        self._optimizer.step(learning_rate, gradient_scale, skipped)
        self._stores.on_applied(skipped)
        # A technique that changes masters at the end of the step must not meet gathers that still read them, so these
        # are carried out now.  Otherwise gathers start here and end in the next forward.
        if any(technique.changes_masters for technique in self._ending):
            self._stores.gather_weights()
        else:
            self._stores.start_weight_gather()
        if self._average is not None:
            self._average.update()

    def _unused_everywhere(self) -> frozenset[str]:
        """Names that no rank used in this step, which plain torch would leave untouched (their gradient is None)."""
        names = sorted(self._stores.names())
        mine = self._stores.unused()
        flags = torch.tensor([float(name in mine) for name in names], device=self._mesh.device)
        for view in self._summing:
            dist.all_reduce(flags, group=view.group)
        # A flag that has been summed over all these groups counts the ranks on which the parameter was unused.
        everyone = float(math.prod(view.size for view in self._summing))
        return frozenset(name for name, flag in zip(names, flags.tolist(), strict=True) if flag == everyone)


def _largest(norms: Sequence[float]) -> float:
    """The largest norm; one that is not finite, if there is one."""
    return next((norm for norm in norms if not math.isfinite(norm)), max(norms))


def squared_norm(shards: Sequence[Shard]) -> Tensor:
    """Sum of squares of the gradient elements that count on this rank, 0-d, in fp64.  Some may lie with the host."""
    squares: list[Tensor] = []
    for shard in shards:
        if shard.counts and (values := shard.gradient_values()) is not None and values.numel():
            squares.append(squared_sum(values))
        if shard.rest is not None:
            shard.rest()
    return (
        torch.stack([square.to(squares[0].device) for square in squares]).sum()
        if squares
        else torch.zeros((), dtype=torch.float64)
    )


def seed_step(seed: int, step: int, data_index: int, device: torch.device) -> None:
    """Seed torch's own generators from the step, so that even unkeyed randomness in a user's code repeats after a
    resume.

    Ranks that share samples have one data index, and draw alike.
    """
    # A mixed-radix number with the primes above 10^6 and 2^12 as radices: keys differ as long as a run has fewer steps
    # and data ranks than these.  Beyond, step 1,000,003 draws like step 0 of the next seed, and data rank 4,099 like
    # rank 0 a step later, which no computation compares.  torch's generators mix a seed themselves, so neighbouring
    # keys need no hash.
    key = ((seed * 1_000_003 + step) * 4_099 + data_index) % 2**63
    if device.type == "cpu":
        # `torch.manual_seed` writes down the stack for each device that is not there: 0.3 ms (a Xeon core, 2026-11).
        torch.default_generator.manual_seed(key)
    else:
        torch.manual_seed(key)
