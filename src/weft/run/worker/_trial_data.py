"""Batches for a proof: awkward on purpose, and the same under every plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from weft.config.document import Json
from weft.config.plan import Plan
from weft.model.blueprint import Batch, Blueprint
from weft.model.samples import UNKNOWN_VALUES, draw_integers
from weft.run.data import rank_range

_IGNORED = -100


class TrialData:
    """Random samples shaped like the blueprint's example, each a function of its id alone.

    Labels that can be ignored are ignored unevenly: sample by sample another share of the sequence, one sample in eight
    entirely, so that a mean over ranks in place of a mean over tokens shows.
    """

    def __init__(
        self, blueprint: Blueprint, plan: Plan, *, data_index: int, seed: int, label_range: int | None = None
    ) -> None:
        """`label_range` bounds class labels; by default they share the vocabulary, or are 0 to 9."""
        assert blueprint.example is not None, "a blueprint without an example has no trial data"
        self._example = blueprint.example(1)
        self._blueprint = blueprint
        self._plan = plan
        self._seed = seed
        self._start, self._stop = rank_range(plan.microbatch, plan.mesh.data, data_index)
        self._label_range = label_range or blueprint.vocabulary_size or UNKNOWN_VALUES

    def microbatches(self, step: int) -> list[Batch]:
        """This data rank's microbatches of a step."""
        first = step * self._plan.global_batch_size
        samples = [self.sample(first + index) for index in range(self._start, self._stop)]
        size = self._plan.microbatch.size
        return [
            {name: torch.cat([sample[name] for sample in samples[at : at + size]]) for name in samples[0]}
            for at in range(0, len(samples), size)
        ]

    def evaluation(self, global_batches: int | None = None) -> Iterator[list[Batch]]:
        """One global batch, that of the first step."""
        del global_batches
        yield self.microbatches(0)

    def state(self, step: int) -> dict[str, Json]:
        """The cursor."""
        return {"step": step}

    def step_of(self, state: Mapping[str, Json]) -> int:
        """The cursor of a saved state."""
        step = state["step"]
        assert isinstance(step, int)
        return step

    def sample(self, index: int) -> dict[str, Tensor]:
        """Fields of one sample, each with a leading dimension of 1."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        fields: dict[str, Tensor] = {}
        for name, like in self._example.items():
            if name != "sample_ids":
                fields[name] = self._field(name, like, index, generator)
        fields["sample_ids"] = torch.tensor([index])
        return fields

    def _field(self, name: str, like: Tensor, index: int, generator: torch.Generator) -> Tensor:
        shape = (1, *like.shape[1:])
        if like.is_floating_point():
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(like.dtype)
        if name in ("positions", "document_ids"):
            return self._documents(name, shape[1], index)
        if like.dtype == torch.bool or name == "attention_mask":
            return torch.ones(shape, dtype=like.dtype)
        values = draw_integers(self._blueprint.samples.get(name), shape, self._label_range, generator)
        if name == "labels" and len(shape) > 1:
            values[torch.rand(shape, generator=generator) < (index % 8) / 7.0] = _IGNORED
        return values

    def _documents(self, name: str, length: int, index: int) -> Tensor:
        """Two documents, cut at another place in every sample."""
        cut = 1 + index % (length - 1)
        places = torch.arange(length)
        document = (places >= cut).long()
        return (document if name == "document_ids" else places - cut * document)[None]
