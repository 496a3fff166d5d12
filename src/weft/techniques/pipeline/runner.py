"""Runs a step's microbatches through the stages of this rank, in the order that the schedule gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.model.blueprint import Batch, Blueprint
from weft.model.families import FoundCut
from weft.techniques.core import (
    LossTotals,
    MicrobatchState,
    ModelPart,
    StepObserver,
    compute_dtype_of,
    evaluating,
    take_microbatch,
)
from weft.techniques.core._runner import Actions, no_actions
from weft.techniques.pipeline.orders import Action, forward_orders, schedule_orders
from weft.techniques.pipeline.routes import Routes, StageMessage, plan_routes, sent_by, wanted_by
from weft.techniques.pipeline.schedules import stage_ranks
from weft.techniques.pipeline.stage import Stage
from weft.techniques.pipeline.stages import choose_cuts
from weft.techniques.pipeline.transport import StageTransport, signature_of

_ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
"""Names of actions in a run's record."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """The state that the actions of one step share."""

    microbatches: Sequence[Batch]
    step: int
    seed: int
    scale: float | Tensor
    totals: LossTotals
    full: frozenset[Action]
    """Input passes that run as full backwards (the last one of a `fully_shard` part)."""
    split: frozenset[tuple[int, int]]
    """(stage, microbatch) pairs whose weight gradients come in a pass of their own."""
    handed: dict[StageMessage, Tensor] = field(default_factory=dict[StageMessage, Tensor])
    """Messages between two stages of this rank, which are not sent."""


class PipelineRunner:
    """The runner of a rank in a pipeline.  Create on every rank alike, with this rank's parts in rising order of stage.

    Any number of microbatches will do, and data ranks need not agree on it; all ranks of one pipeline must be given
    the same microbatches.  `dtype` is what floating inputs are cast to: by default that of the parts' parameters.
    `timeout_seconds` limits the wait for a peer on the CPU (default: the group's own limit).
    """

    def __init__(
        self,
        parts: Sequence[ModelPart],
        blueprint: Blueprint,
        plan: Plan,
        mesh: Mesh,
        *,
        dtype: torch.dtype | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        self.actions: Actions = no_actions
        self._blueprint = blueprint
        self._device = mesh.device
        self._rank = mesh.index("pipeline")
        settings = plan.pipeline_parallel
        self._cuts = settings.cuts
        self._shape = settings.shape(mesh.size("pipeline"))
        self._splits = settings.splits_backward
        self._ranks = stage_ranks(*self._shape)
        self._stages = [
            Stage(part, blueprint, dtype if dtype is not None else compute_dtype_of(part.module)) for part in parts
        ]
        self._part_of = {part.stage: index for index, part in enumerate(parts)}
        expected = [stage for stage, rank in enumerate(self._ranks) if rank == self._rank]
        assert list(self._part_of) == expected, f"parts are stages {list(self._part_of)}, the schedule has {expected}"
        self._transport = StageTransport(mesh, self._ranks, timeout_seconds=timeout_seconds)
        self._known: dict[tuple[bool, int], tuple[Sequence[Action], Routes]] = {}

    @property
    def transport(self) -> StageTransport:
        """The channels to the stages before and after."""
        return self._transport

    def assume(self, activation: tuple[tuple[int, ...], torch.dtype] | None) -> None:
        """Compute without messages, for a dry run.  `activation`: shape and dtype of the first stage's output."""
        self._transport.assume(activation, self._shape_for if isinstance(self._blueprint.cut, FoundCut) else None)

    def _shape_for(self, border: int, samples: int) -> tuple[int, ...]:
        cut = self._blueprint.cut
        assert isinstance(cut, FoundCut), "nothing else says what crosses"
        cuts = choose_cuts(self._blueprint.block_costs, len(cut.blocks), len(self._ranks), self._cuts)
        return cut.crossing_shape(cuts[border - 1], samples)

    def forward_backward(
        self, microbatches: Sequence[Batch], *, step: int, seed: int, scale: float | Tensor, observer: StepObserver
    ) -> LossTotals:
        """See `Runner`.

        Raises:
            CollectiveError: another rank of the pipeline has stopped or is stuck.
        """
        actions = self._begin(microbatches, training=True)
        state = self._new_step(microbatches, step, seed, scale, actions)
        progress = _Progress(actions, self._part_of, observer)
        for index, action in enumerate(actions):
            if action in state.full:
                self._stage(action).finish_weights()
            if action.kind == "B" and not self._splits or action in state.full:
                progress.before_full_backward(action)
            self._perform(action, actions[index + 1] if index + 1 < len(actions) else None, state)
            progress.after(action)
        self._transport.finish()
        progress.finish()
        return state.totals

    def evaluate(self, microbatches: Sequence[Batch], *, step: int, seed: int) -> LossTotals:
        """See `Runner`.

        Raises:
            CollectiveError: another rank of the pipeline has stopped or is stuck.
        """
        actions = self._begin(microbatches, training=False)
        state = self._new_step(microbatches, step, seed, 1.0, actions)
        with evaluating([stage.part.module for stage in self._stages]):
            for index, action in enumerate(actions):
                self._perform(action, actions[index + 1] if index + 1 < len(actions) else None, state)
        self._transport.finish()
        return state.totals

    def _begin(self, microbatches: Sequence[Batch], *, training: bool) -> Sequence[Action]:
        """Return this rank's actions and open the channels for them."""
        key = (training, len(microbatches))
        if key not in self._known:  # orders and routes depend on nothing else of a step
            orders = (schedule_orders if training else forward_orders)(*self._shape, len(microbatches))
            self._known[key] = (orders[self._rank], plan_routes(orders, self._ranks, self._rank))
        actions, routes = self._known[key]
        self._transport.begin(routes, [signature_of(batch, self._blueprint.inputs) for batch in microbatches])
        return actions

    def _new_step(
        self, microbatches: Sequence[Batch], step: int, seed: int, scale: float | Tensor, actions: Sequence[Action]
    ) -> _Step:
        full = self._full_backward_tails(actions)
        return _Step(
            microbatches=microbatches,
            step=step,
            seed=seed,
            scale=scale,
            totals=LossTotals.empty(self._device),
            full=full,
            split=frozenset((a.stage, a.microbatch) for a in actions if a.kind == "I" and a not in full),
        )

    def _full_backward_tails(self, actions: Sequence[Action]) -> frozenset[Action]:
        """Return the last input pass of every `fully_shard` part, which must run as a full backward.

        `fully_shard` reduces inside of backward, so all gradients must be there by then.  Postponed weight passes run
        just before, which costs such a part some of the schedule's gain.
        """
        last = {action.stage: action for action in actions if action.kind in "BI"}
        return frozenset(
            action
            for action in last.values()
            if self._splits and isinstance(self._stage(action).part.module, FSDPModule)
        )

    def _stage(self, action: Action) -> Stage:
        return self._stages[self._part_of[action.stage]]

    def _perform(self, action: Action, following: Action | None, step: _Step) -> None:
        needed = wanted_by(action, len(self._ranks))
        # The receives of this action and of the next are posted before this one computes: the next message then travels
        # meanwhile.  Posting further ahead would hold more buffers at once.
        self._transport.prefetch(needed)
        if following is not None:
            self._transport.prefetch(wanted_by(following, len(self._ranks)))
        received = None if needed is None else self._take(needed, step)
        stage = self._stage(action)
        with self.actions(_ACTION_NAMES[action.kind], action.microbatch, action.stage):
            if action.kind == "F":
                result = self._forward(stage, action, received, step)
            elif action.kind == "W":
                result = stage.backward_weights(action.microbatch)
            else:
                result = stage.backward(action.microbatch, received)
        sent = sent_by(action, len(self._ranks))
        if sent is not None:
            assert result is not None
            # Two stages of one rank meet at the turn of a V: the tensor is handed over without a message.
            if self._transport.is_local(sent):
                step.handed[sent] = result
            else:
                self._transport.send(sent, result)

    def _take(self, message: StageMessage, step: _Step) -> Tensor:
        return step.handed.pop(message) if self._transport.is_local(message) else self._transport.receive(message)

    def _forward(self, stage: Stage, action: Action, received: Tensor | None, step: _Step) -> Tensor | None:
        batch, state = self._taken(step.microbatches[action.microbatch], stage.part, step)
        split = (action.stage, action.microbatch) in step.split
        return stage.forward(
            action.microbatch, batch, state, received, split=split, scale=step.scale, totals=step.totals
        )

    def _taken(self, batch: Batch, part: ModelPart, step: _Step) -> tuple[Batch, MicrobatchState]:
        """Return the microbatch on the device: all fields on the last stage, which has the loss, else the model's."""
        read_fields = {"sample_ids", "tokens", "document_ids", *self._blueprint.inputs.values()}
        composed = any(name not in batch for name in self._blueprint.inputs.values())  # of several fields
        fields = (
            batch
            if part.is_last or composed
            else {name: tensor for name, tensor in batch.items() if name in read_fields}
        )
        return take_microbatch(fields, part.context, self._device, step.seed, step.step)


class _Progress:
    """Tells the observer which parts are done, highest stage first, whatever the schedule.

    Reductions are collectives over data ranks.  One fixed order keeps them matched where ranks have other schedules or
    numbers of microbatches.
    """

    def __init__(self, actions: Sequence[Action], part_of: dict[int, int], observer: StepObserver) -> None:
        self._part_of, self._observer = part_of, observer
        self._last_backward = {action.stage: action for action in actions if action.kind in "BI"}
        self._last = {action.stage: action for action in actions if action.kind in "BIW"}
        self._remaining = Counter(action.stage for action in actions if action.kind == "B")
        self._complete: set[int] = set()
        self._next = len(part_of) - 1

    def before_full_backward(self, action: Action) -> None:
        is_last = self._last_backward[action.stage] == action
        self._remaining[action.stage] -= action.kind == "B"
        # Where a schedule splits backwards, only the last one comes here, as B or as I.
        self._observer.on_backward(self._part_of[action.stage], 0 if is_last else self._remaining[action.stage])
        if is_last:
            self._observer.on_last_forward(self._part_of[action.stage])

    def after(self, action: Action) -> None:
        if self._last.get(action.stage) == action:
            self._complete.add(self._part_of[action.stage])
        while self._next in self._complete:
            self._tell()

    def finish(self) -> None:
        """Tell the parts that had nothing to do, too (a data rank without microbatches)."""
        while self._next >= 0:
            self._tell()

    def _tell(self) -> None:
        self._observer.on_last_backward(self._next)
        self._next -= 1
