"""The step of a layout: stages, schedule, update, and what makes up the time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from weft.config.cluster import Cluster, Collective, Devices
from weft.errors import PlanError
from weft.model.profile import Block, Profile
from weft.planning.price._check_layout import check_layout
from weft.planning.price._collectives import collective_seconds
from weft.planning.price._memory import Memories
from weft.planning.price._model_cost import ModelCost, Stages, model_cost_of
from weft.planning.price._prediction import Prediction, ScheduleSpan, TimeTerms
from weft.planning.price._stages import BlockCost, BlockCosts, key_of
from weft.planning.price._update import Update, trained_loads, update_of
from weft.techniques.buckets.cost import bucket_of
from weft.techniques.buckets.sizes import SMALLEST_BUCKET
from weft.techniques.cost_terms import (
    DATASHEET,
    WEFT,
    AxisGroup,
    BoundedCache,
    Calibration,
    CostKey,
    Device,
    Framework,
    Groups,
    Layout,
    Network,
    RankLoad,
)
from weft.techniques.offload.cost import unloading
from weft.techniques.pipeline.cost import (
    PipelineTimes,
    StageTimes,
    balance_of,
    busy_seconds,
    closed_form,
    least_share,
    shares_of_closed_form,
)
from weft.techniques.pipeline.schedules import stage_ranks
from weft.techniques.pipeline.timeline import Timelines
from weft.techniques.zero.cost import gathers_of, gathers_weights, hiding, reduces_once, waits_of

_KINDS = {"F": "forward", "B": "backward", "I": "input_backward", "W": "weight_backward"}


class _LayoutCosts(NamedTuple):
    """A layout with what its price is made of."""

    layout: Layout
    groups: Groups
    device: Device
    model_cost: ModelCost
    stages: Stages
    times: StageTimes
    gathering: float
    """Exposed seconds of ZeRO-3's collectives of one microbatch, all stages."""
    scatters: list[float]
    """Exposed seconds of ZeRO-3's one reduction of a step, by stage; 0 where every microbatch reduces."""
    unloading: float
    """Exposed seconds of one microbatch's activations on their way to host memory and back, all stages."""


class CostModel:
    """Prices layouts of one model on one cluster; keeps every part that several layouts share."""

    def __init__(
        self, profile: Profile, cluster: Cluster, framework: Framework = WEFT, calibration: Calibration = DATASHEET
    ) -> None:
        calibration = calibration if cluster.has_accelerators else calibration.on_cores()
        corrections = calibration.corrections
        if corrections.step_seconds is not None:
            calibration = replace(calibration, step_seconds=corrections.step_seconds)
        if corrections.spread is not None:
            framework = replace(framework, spread=corrections.spread)
        self.profile, self.cluster, self.framework, self.calibration = profile, cluster, framework, calibration
        self.network = Network(cluster, slowdowns=calibration.link_slowdowns)
        self._timelines = Timelines()
        self._collectives = BoundedCache[tuple[str, float, AxisGroup, str], float]()
        # Keyed by the threads of a rank: the only setting of a plan that changes what a device is.
        self._devices: dict[float, tuple[Device, BlockCosts]] = {}
        self._model_costs: dict[tuple[object, ...], ModelCost] = {}
        self._sample_flops = model_flops(profile)
        self.memories = Memories(profile, framework, on_accelerator=cluster.has_accelerators)

    # ── parts, for bounds and reports ─────────────────────────────────────────────────────────────────────────────

    def groups(self, layout: Layout) -> Groups:
        """Return the groups of ranks of every axis and the links that they cross."""
        return self.network.groups(layout)

    def seconds(self, kind: Collective, size_bytes: float, group: AxisGroup, algorithm: str = "auto") -> float:
        """Return the seconds of a collective inside training; `algorithm` as a plan names it."""
        if group.size < 2:
            return 0.0
        key = (kind, size_bytes, group, algorithm)
        if key not in self._collectives:
            known, more = self.calibration.corrections, collective_seconds(kind, size_bytes, group, algorithm)
            self._collectives[key] = more * known.communication + known.collective_seconds
        return self._collectives[key]

    def device(self, layout: Layout) -> Device:
        """Return what one rank computes on."""
        return self._machine(layout)[0]

    @property
    def hiding(self) -> dict[str, float]:
        """Return the share of a computation that hides ZeRO-3's collectives, and how much they slow it down: see
        `waits_of`."""
        return hiding(self.calibration, self.framework, on_accelerator=self.memories.on_accelerator)

    def copied(self, layout: Layout) -> float:
        """Return the seconds per byte of ZeRO-3's copies between weights and the flat tensors that travel: on cores
        they are no longer small beside the wire."""
        if self.memories.on_accelerator:
            return 0.0
        device = self.device(layout)
        known = device.correction(layout.precision)
        return 2.0 / device.memory_bytes_per_second * (1.0 if known is None else known.copies)

    def block_cost(self, block: Block, layout: Layout) -> BlockCost:
        """Return what one microbatch costs in a block on one rank."""
        return self._machine(layout)[1].cost(block, self._key(layout))

    def block_sums(self, layout: Layout) -> tuple[float, float]:
        """Return the seconds of one microbatch on one rank that has all blocks but stem and tail, with nothing computed
        again; and what of it is computing."""
        return self._machine(layout)[1].sums(self._key(layout))

    def transfer(self, layout: Layout, pair: AxisGroup) -> float:
        """Return the seconds of one microbatch's activation from a stage to the next."""
        tokens = layout.microbatch_size * self.profile.sequence_length / layout.context
        # Stages are cut between blocks, so one activation as wide as a block's entry crosses.
        size = tokens * self.profile.blocks[0].entry_elements_per_token * layout.element_bytes
        if layout.sequence_parallel:
            size /= layout.tensor
        return self.seconds("send", size, pair)

    def model_cost(self, layout: Layout) -> ModelCost:
        """Return the costs of all blocks: a microbatch's sums, and stages for any cuts."""
        costs = self._key(layout)
        key = (costs, layout.recompute, layout.adapters_only, self._threads(layout))
        if key not in self._model_costs:
            machine = self._machine(layout)[1]
            self._model_costs[key] = model_cost_of(self.profile, layout, lambda block: machine.cost(block, costs))
        return self._model_costs[key]

    # ── the whole ─────────────────────────────────────────────────────────────────────────────────────────────────

    def predict(self, layout: Layout, *, exact: bool = False, spans: bool = False) -> Prediction:
        """Return time and memory of a step.

        `exact` plays the schedule instead of using its closed form; `spans` does so too and returns what it saw.

        Raises:
            PlanError: the layout does not fit the model or the cluster; the message has the change to make.
        """
        problems = check_layout(self.profile, self.cluster, layout)
        if problems:
            raise PlanError("\n".join(problems))
        case = self._case(layout)
        time = self.time(layout, exact=exact or spans, case=case)
        return Prediction(
            time=time,
            spread=self.framework.spread,
            stages=self.memories.of(layout, case.model_cost.cuts(layout)),
            usable_bytes=self.cluster.usable_memory_bytes,
            margin_bytes=self.cluster.device_memory_bytes - self.cluster.usable_memory_bytes,
            model_flops=self._sample_flops * layout.microbatch_size * layout.microbatches * layout.data,
            spans=self._spans(case) if spans else (),
        )

    def time(self, layout: Layout, *, exact: bool = False, case: _LayoutCosts | None = None) -> TimeTerms:
        """Return the seconds of a step by cause.  The layout must fit (`check_layout`)."""
        case = case or self._case(layout)
        step, without_transfers = self._pipeline(case, exact=exact)
        update = self._update(case, step)
        return self._terms(case, step.seconds, without_transfers, update)

    def step_seconds(self, layout: Layout, *, exact: bool = False, update: bool = True) -> float:
        """Return `time(...).total` without its causes, which is half of the work; without `update`, of the pipeline
        alone."""
        case = self._case(layout)
        step = self._step(case, exact=exact)
        inside = step.seconds + (sum(self._update(case, step)) if update else 0.0)
        return inside * self.slowdown(layout.world_size) + self.calibration.step_seconds

    def least_seconds(self, layout: Layout, *, update: bool = True) -> float:
        """Return seconds that `step_seconds(..., exact=True)` is not below, by closed form; without `update`, of the
        pipeline alone.  A bound that holds for all that was drawn, not a proved one."""
        case, name, ranks = self._case(layout), layout.schedule, layout.pipeline
        step, share = self._step(case, exact=False), 1.0
        if ranks > 1:
            # The closed form of a schedule assumes equal stages; played with unequal ones it can be shorter, by the
            # share that the balance of the stages allows.
            balance = balance_of(case.times)
            share = least_share(shares_of_closed_form(name, ranks), balance, ranks, layout.microbatches)
        inside = step.seconds * share
        if ranks > 1:
            # No step is shorter than the work and the waiting of its busiest rank.
            inside = max(inside, busy_seconds(name, ranks, layout.chunks, layout.microbatches, case.times))
        inside += sum(self._update(case, step)) * share if update else 0.0
        return inside * self.slowdown(layout.world_size) + self.calibration.step_seconds

    def slowdown(self, world_size: int) -> float:
        """Return how many times as long as its parts a step of so many ranks takes."""
        # Stragglers: the slowest of n nodes is later by about log n.
        nodes = max(1.0, world_size / max(node.devices.count for node in self.cluster.nodes))
        return self.framework.slowdown * (1.0 + self.calibration.straggler * math.log2(nodes))

    def bucket(self, layout: Layout, *, low: int = SMALLEST_BUCKET) -> int | None:
        """Return the bytes of a gradient bucket for which the fullest rank waits least, at least `low`; None where the
        layout has no buckets.  Of the closed form, with a rank's chunks taken for one stage and no slack in the
        pipeline: the price may know a neighbour that is better."""
        if layout.shards_weights or layout.data * layout.context == 1 or layout.trained_share == 0.0:
            return None
        case = self._case(layout)
        # All ranks wait for the one that reduces most.
        load = max(trained_loads(layout, self._loads(case)), key=lambda load: load.dense + load.experts)
        return bucket_of(layout, load, case.device, case.groups, self.seconds, low)

    def _case(self, layout: Layout) -> _LayoutCosts:
        groups, device = self.groups(layout), self.device(layout)
        model_cost = self.model_cost(layout)
        stages = model_cost.stages(model_cost.cuts(layout))
        forward, inputs, gathering, scatters = self._gathered(layout, stages, groups)
        # ZeRO-3's gathers come first: activations are offloaded beside the longer passes that result.
        away = 0.0
        if layout.offloads_activations:
            sizes = stages.kept_bytes
            out, back = (
                [unloading(layout, size, beside, self.calibration) for size, beside in zip(sizes, passes, strict=True)]
                for passes in (forward, inputs)
            )
            forward = [one + more for one, more in zip(forward, out, strict=True)]
            inputs = [one + more for one, more in zip(inputs, back, strict=True)]
            away = sum(out) + sum(back)
        hop = self.transfer(layout, groups.pipeline) if layout.pipeline > 1 else 0.0
        times = StageTimes(forward=forward, input=inputs, weight=stages.weight, transfer=hop)
        return _LayoutCosts(layout, groups, device, model_cost, stages, times, gathering, scatters, away)

    def _step(self, case: _LayoutCosts, *, exact: bool) -> PipelineTimes:
        layout, times = case.layout, case.times
        play = self._timelines.play if exact else closed_form
        if layout.pipeline > 1 and times.transfer and not self.framework.overlap_pipeline:
            hop = times.transfer
            times = StageTimes(
                # Without overlap a stage sends between its passes, so each pass is longer by a hop.
                forward=[time + hop for time in times.forward],
                input=[time + hop for time in times.input],
                weight=times.weight,
            )
        return play(layout.schedule, layout.pipeline, layout.chunks, layout.microbatches, times)

    def _pipeline(self, case: _LayoutCosts, *, exact: bool) -> tuple[PipelineTimes, float]:
        """Return the pipeline's step, and its seconds if transfers took no time."""
        layout, times, step = case.layout, case.times, self._step(case, exact=exact)
        if layout.pipeline == 1 or times.transfer == 0.0:
            return step, step.seconds
        # Played again with free transfers: the difference is what transfers cost, wherever they hide.
        free = StageTimes(forward=times.forward, input=times.input, weight=times.weight)
        return step, self._step(case._replace(times=free), exact=exact).seconds

    def _loads(self, case: _LayoutCosts) -> list[RankLoad]:
        layout, stages, times = case.layout, case.stages, case.times
        # A rank's gradients are those of all of its chunks.
        ranks = stage_ranks(layout.schedule, layout.pipeline, layout.chunks) if layout.num_stages > 1 else (0,)
        totals = [[0.0] * 5 for _ in range(layout.pipeline)]
        rows = zip(
            ranks, stages.dense_parameters, stages.expert_parameters, times.forward, times.input, times.weight,
            case.scatters, strict=True,
        )  # fmt: skip
        for rank, dense, experts, forward, inputs, weight, scatter in rows:
            total = totals[rank]
            total[0] += dense
            total[1] += experts
            total[2] += forward
            total[3] += inputs + weight
            total[4] += scatter
        return [RankLoad(*total) for total in totals]

    def _update(self, case: _LayoutCosts, step: PipelineTimes) -> Update:
        layout = case.layout
        update = update_of(layout, self._loads(case), step, case.device, case.groups, self.seconds)
        if self.profile.tied and layout.pipeline > 1 and not layout.adapters_only:
            size = self.profile.vocabulary_size * self.profile.hidden_size * layout.gradient_bytes / layout.tensor
            # A tied embedding stands on the first and the last stage, whose gradients are summed between the two.
            ends = self.network.boundary(layout, layout.pipeline - 1)
            update = update._replace(data=update.data + self.seconds("all_reduce", size, ends))
        return update

    def _terms(self, case: _LayoutCosts, pipeline: float, without_transfers: float, update: Update) -> TimeTerms:
        layout, (passes, again) = case.layout, case.model_cost.sums
        # The mean over ranks: terms add up to the step, and the bubble is what is left of the pipeline.
        each = layout.microbatches / layout.pipeline
        busy = each * (passes.seconds + again.seconds + case.gathering + case.unloading)
        inside = pipeline + sum(update)
        return TimeTerms(
            ideal=each * passes.ideal,
            matrix_shapes=each * passes.shapes,
            memory_bound=each * passes.memory,
            recompute=each * again.compute,
            tensor=each * (passes.tensor + again.tensor),
            context=each * (passes.context + again.context),
            expert=each * (passes.expert + again.expert),
            pipeline=pipeline - without_transfers,
            bubble=without_transfers - busy,
            data=update.data + each * (case.gathering + passes.statistics + again.statistics),
            optimizer=update.optimizer,
            offload=update.offload + each * case.unloading,
            other=inside * (self.slowdown(layout.world_size) - 1.0) + self.calibration.step_seconds,
        )

    # ── what the parts need ───────────────────────────────────────────────────────────────────────────────────────

    def _key(self, layout: Layout) -> CostKey:
        return key_of(layout, self.groups(layout), has_batch_norm=bool(self.profile.facts.has_batch_norm))

    def _threads(self, layout: Layout) -> float:
        """Cores of one rank, where cores are the devices."""
        if self.memories.on_accelerator:
            return 1.0
        # Ranks of a node share its cores; the node with the fewest decides.
        ranks = -(-layout.world_size // self.cluster.num_nodes)
        return min(node.cores for node in self.cluster.nodes) / ranks

    def _machine(self, layout: Layout) -> tuple[Device, BlockCosts]:
        threads = self._threads(layout)
        if threads not in self._devices:
            slowest = _slowest(self.cluster)
            device = Device(slowest, self.calibration, self.framework, threads)
            self._devices[threads] = (device, BlockCosts(self.profile, device, self.seconds))
        return self._devices[threads]

    def _gathered(
        self, layout: Layout, stages: Stages, groups: Groups
    ) -> tuple[list[float], list[float], float, list[float]]:
        """Return forward and input seconds of every stage with ZeRO-3's exposed collectives, and these alone; and what
        the reduction adds to each stage's last backward, where it comes once per step."""
        if not gathers_weights(layout):
            return stages.forward, stages.input, 0.0, [0.0] * len(stages.forward)
        weight, gradient = layout.element_bytes, layout.gradient_bytes * layout.trained_share
        # The message that is gathered is one block's weights: its size decides the speed per byte.
        blocks = max(1, len(self.profile.blocks)) / weight
        dense_bytes, expert_bytes = sum(stages.dense_parameters) / blocks, sum(stages.expert_parameters) / blocks
        of_dense, of_experts = gathers_of(dense_bytes, expert_bytes, groups, self.seconds)
        copied = self.copied(layout)
        once, beside = reduces_once(layout, self.framework), self.hiding
        forward, inputs, scatters = list[float](), list[float](), list[float]()
        exposed = 0.0
        for ahead, back, more, dense, experts in zip(
            stages.forward, stages.input, stages.weight, stages.dense_parameters, stages.expert_parameters, strict=True
        ):
            sent = weight * (dense * (of_dense.gather + copied) + experts * (of_experts.gather + copied))
            scattered = gradient * (dense * (of_dense.scatter + copied) + experts * (of_experts.scatter + copied))
            # Weights are gathered before forward and before backward; gradients are scattered behind backward.
            waits = waits_of(sent, scattered, ahead, back + more, once=once, **beside)
            forward.append(ahead + waits.forward)
            inputs.append(back + waits.backward)
            scatters.append(waits.last)
            exposed += waits.forward + waits.backward
        return forward, inputs, exposed, scatters

    def _spans(self, case: _LayoutCosts) -> tuple[ScheduleSpan, ...]:
        layout = case.layout
        shape = (layout.schedule, layout.pipeline, layout.chunks, layout.microbatches)
        return tuple(
            ScheduleSpan(
                rank=rank,
                kind=_KINDS[action.kind],
                chunk=action.stage // layout.pipeline,
                microbatch=action.microbatch,
                start=start,
                stop=stop,
            )
            for rank, action, start, stop in self._timelines.spans(*shape, case.times)
        )


def predict(
    profile: Profile,
    cluster: Cluster,
    layout: Layout,
    *,
    framework: Framework = WEFT,
    calibration: Calibration = DATASHEET,
    spans: bool = False,
) -> Prediction:
    """Return time and memory of one step, with the schedule played action by action.

    Raises:
        PlanError: the layout does not fit the model or the cluster.
        ClusterError: the speed of the devices is unknown.
    """
    return CostModel(profile, cluster, framework, calibration).predict(layout, exact=True, spans=spans)


def model_flops(profile: Profile) -> float:
    """Return the FLOPs of one sample's forward and backward: nothing computed again, causal attention counted half."""
    length = profile.sequence_length
    operators = [operator for part in profile.parts for operator in part.operators]
    halves = (0.5 if operator.causal and operator.window is None else 1.0 for operator in operators)
    return 3.0 * length * sum(one.forward_flops(length) * half for one, half in zip(operators, halves, strict=True))


def _slowest(cluster: Cluster) -> Devices:
    """The devices that all others wait for."""
    return min((node.devices for node in cluster.nodes), key=lambda part: max(part.peak_flops.values(), default=0.0))
