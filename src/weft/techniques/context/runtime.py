"""Context parallelism on a rank: which tokens of each sample it takes, and attention that sees those of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import axis_coordinates
from weft.errors import PlanError
from weft.techniques.context.attention import Attend, AttentionModule, VisitedAttention, wrap_attention
from weft.techniques.context.exchange import GatherExchange, RingExchange
from weft.techniques.context.token_runs import BETWEEN, HEADS, exchanging_ranks, runs_of
from weft.techniques.context.ulysses import HeadExchange
from weft.techniques.core import ModelPart, StepContext
from weft.techniques.core.local_tokens import LocalTokens
from weft.techniques.runtime import Build, TechniqueRuntime

_OF_DOCUMENTS = frozenset({"positions", "document_ids"})
"""Fields of a batch that say which document a token is of."""


@dataclass(frozen=True, slots=True)
class _SequenceShard:
    """Cuts a batch along its tokens.  Labels stand at the tokens that they are of, so nothing is lost at the cuts."""

    view: GroupView
    isolates: bool
    """Whether the model is given its documents, and keeps them apart."""
    padding_token: int | None = None
    """See `Blueprint.padding_token`."""

    def cut_batch(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], LocalTokens]:
        """See `SequenceShard`: every field of (samples, tokens, …) is cut."""
        length = batch["tokens"].shape[1]
        runs = runs_of(length, self.view.size, self.view.index)
        tokens = LocalTokens(length=length, runs=runs, documents=_documents(batch) if self.isolates else None)
        if self.padding_token is not None:
            from weft.model.attention.places import places_beside_padding  # loaded where a model counts so

            # Of whole samples: a rank does not see how much padding stands before its tokens.
            places = places_beside_padding(batch["tokens"], self.padding_token)
            tokens = replace(tokens, places=self._cut(places, tokens))
        return {name: self._cut(field, tokens) for name, field in batch.items()}, tokens

    def _cut(self, field: Tensor, tokens: LocalTokens) -> Tensor:
        if field.dim() < 2 or field.shape[1] != tokens.length:
            return field
        return torch.cat([field[:, start:stop] for start, stop in tokens.runs], 1)


def _documents(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Document of every token: as the batch says, or counted where its positions start anew; None: one per sample."""
    if "document_ids" in batch or "positions" not in batch:
        return batch.get("document_ids")
    places = batch["positions"]
    return (torch.diff(places, prepend=places[:, :1] - 1, dim=1) != 1).cumsum(1)


@final
class ContextRanks(TechniqueRuntime):
    """This rank's tokens of each sample."""

    def __init__(self, build: Build) -> None:
        self._build = build

    def split(self, part: ModelPart) -> None:
        blueprint, context, view = self._build.blueprint, self._build.context, self._build.mesh["context"]
        _check_built(self._build)
        attending = self._attending  # found before there are hooks, with which no model can be copied
        shares = _SequenceShard(view, not _OF_DOCUMENTS.isdisjoint(blueprint.inputs.values()), blueprint.padding_token)
        context.sequence_shard = shares
        if blueprint.attending and shares.isolates:
            _make_no_masks(part.module)
        keyword, kind = blueprint.position_input, blueprint.attention
        assert keyword is not None, "the model was checked"
        assert kind is not None, "the model was checked"
        attend = _attention_of(self._build, view)
        if self._build.plan.compute.compile:
            from weft.techniques.context.operators import make_known  # loaded where it is compiled

            make_known()
        if keyword:
            part.module.register_forward_pre_hook(partial(_give_positions, keyword, context), with_kwargs=True)
        for name in attending:
            try:
                module = part.module.get_submodule(name)
            except AttributeError:
                continue  # another stage's
            shared = AttentionModule(name, attend, kind == "causal", ignores_masks=bool(blueprint.attending))
            module.forward = wrap_attention(module.forward, shared, context)
            if isinstance(module, nn.MultiheadAttention):
                # In evaluation torch's encoder layers would compute it by a kernel of their own, but for its hooks.
                module.register_forward_pre_hook(_nothing)

    @cached_property
    def _attending(self) -> Sequence[str]:
        if names := self._build.blueprint.attending:
            return names
        from weft.techniques.context.trace import attending_modules  # for models that say it themselves

        return attending_modules(self._build.blueprint)


def _nothing(module: nn.Module, args: Any) -> None:
    """Leave what a module is given as it is."""


def _make_no_masks(module: nn.Module) -> None:
    """Masks of transformers would be of this rank's tokens, and some ranks would have none: with a mask it attends to
    as many heads of keys as of queries, without one to fewer, and ranks could not go on together."""
    from weft.model.hf import drop_masks  # models of one's own may need nothing of transformers

    drop_masks(module)


def _give_positions(keyword: str, context: StepContext, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Say where in their samples this rank's tokens stand, which the model would count from
    the first that it sees."""
    state = context.current
    if state is None or state.tokens is None or keyword in kwargs:
        return None
    if state.tokens.places is not None:
        return args, kwargs | {keyword: state.tokens.places}
    device = state.sample_ids.device
    places = torch.cat([torch.arange(start, stop, device=device) for start, stop in state.tokens.runs])
    return args, kwargs | {keyword: places.expand(state.sample_ids.numel(), -1)}


def _attention_of(build: Build, view: GroupView) -> Attend:
    scheme = build.plan.context_parallel.scheme
    if scheme == "usp":
        return _mixed(build, view)
    if scheme == "ulysses":
        return HeadExchange(view)
    return VisitedAttention(view, RingExchange(view) if scheme == "ring" else GatherExchange(view))


def _mixed(build: Build, view: GroupView) -> Attend:
    """Heads are exchanged among neighbours, and keys go round between groups of these.  Call on every rank alike."""
    plan, mesh = build.plan, build.mesh
    neighbours = plan.context_parallel.ulysses
    if not neighbours:
        counts = build.blueprint.attention_heads
        assert counts is not None, "the model was checked"
        own, keys = (max(1, number // plan.mesh.tensor) for number in counts)
        neighbours = exchanging_ranks(view.size, own, keys)
    groups = [list(range(first, first + neighbours)) for first in range(0, view.size, neighbours)]
    heads, ring = (_line(mesh, name, parts) for name, parts in ((HEADS, groups), (BETWEEN, _transposed(groups))))
    between = VisitedAttention(ring, RingExchange(ring), together=neighbours)
    return HeadExchange(heads, group=view.index // neighbours, groups=len(groups), between=between)


def _line(mesh: Mesh, name: str, parts: Sequence[Sequence[int]]) -> GroupView:
    """Return this rank's group among the ranks whose places in the context axis are one of `parts`, which is made the
    first time."""
    if name not in mesh.lines:
        group_of = {place: index for index, part in enumerate(parts) for place in part}
        partition: dict[tuple[object, ...], list[int]] = {}
        for rank in range(mesh.plan.world_size):
            places = axis_coordinates(mesh.plan, rank)
            beside = tuple(place for axis, place in places.items() if axis not in ("context", "expert"))
            partition.setdefault((beside, group_of[places["context"]]), []).append(rank)
        mesh.lines[name] = mesh.create_group(list(partition.values()), name)
    return mesh.lines[name]


def _transposed(parts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(part) for part in zip(*parts, strict=True)]


def _check_built(build: Build) -> None:
    """Refuse what only the built model shows.

    Raises:
        PlanError: what `Blueprint.why_not` says of `context`.
    """
    problem = build.blueprint.why_not("context")
    if not problem and build.plan.compute.compile and build.blueprint.modifies_scores:
        problem = "it caps its scores, adds slopes to them or has sinks, which blocks that are compiled do not share"
    if problem:
        named = f"plan.mesh.context = {build.plan.mesh.context}"
        raise PlanError(f"{named} cannot be had for this model: {problem}. Use plan.mesh.context = 1.")


def create(build: Build) -> TechniqueRuntime:
    """See `weft.techniques.runtime`."""
    return ContextRanks(build)
