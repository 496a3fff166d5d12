"""Shared by systems that train a model of transformers, which a short script builds from its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from weft.interop.systems._contract import Emission, SystemJob
from weft.interop.systems._hugging_face import hugging_face_config, hugging_face_lacks
from weft.interop.systems._system import System, rate_notes
from weft.interop.systems._template import filled
from weft.model.profile import ModelSizes

SCRIPT = "train.py"
TOKENS = ("--tokens", "tokens.bin")
COMMON: Mapping[str, tuple[Any, ...]] = {
    "pipelines": (1,),
    "contexts": (1,),
    "experts": (1,),
    "recomputes": ("none", "full"),
    "fused_losses": (False,),
}
"""Values of a space that they have."""


class TransformersSystem(System):
    """A system around a model of transformers, configured by a JSON file."""

    configuration: ClassVar[str]
    """Name of that file."""

    def lacks(self, sizes: ModelSizes) -> Iterator[str]:
        yield from hugging_face_lacks(sizes)

    def layout_lacks(self, job: SystemJob) -> Iterator[str]:
        if job.layout.recomputes_selectively:
            yield "selective recomputation: transformers recomputes whole blocks"
        if job.layout.fuses_loss:
            yield "a loss fused with the head: transformers writes out all logits"

    def files(self, job: SystemJob, config: Mapping[str, Any], words: Mapping[str, object]) -> dict[str, str]:
        """Return the files of a command: configuration, model, and the script with its `words` filled in."""
        every: dict[str, object] = {
            "TITLE": f"{job.sizes.name} for {self.facts.title}",
            "STEPS": job.steps,
            "MICROBATCH": job.layout.microbatch_size,
            "ACCUMULATION": job.layout.microbatches,
            "LENGTH": job.sequence_length,
            "RECOMPUTE": job.layout.recomputes_whole_blocks,
            **words,
        }
        return {
            self.configuration: json.dumps(config, indent=2) + "\n",
            "model/config.json": _model_text(job),
            SCRIPT: filled(f"train_{self.name}", {word: str(value) for word, value in every.items()}),
        }

    def read(self, emission: Emission) -> dict[str, Any]:
        """Return the configuration that was written."""
        compile(emission.files[SCRIPT], SCRIPT, "exec")
        return json.loads(emission.files[self.configuration])

    def unknown_keys(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Yield what the system has not got at the top of its configuration."""
        for key in config.keys() - self.facts.keys - self.facts.sections.keys():
            yield f"{key} is no key of {self.facts.title}"


def transformers_notes(job: SystemJob) -> Iterator[str]:
    """Yield what is different there."""
    yield "tokens.bin stands for your data: 32-bit tokens, one after another, samples in their order"
    yield "initial weights are those of transformers: other losses than Weft's, alike"
    if job.sizes.num_experts:
        yield "the experts are transformers': no axis splits them, and no loss balances them"
    config = hugging_face_config(job.sizes) or {}
    if config.get("model_type") in ("gemma", "gemma2"):
        yield "transformers scales the embedding and, in Gemma 2, caps scores and logits: Weft's sizes know of neither"
    if config.get("model_type") == "deepseek_v3":
        yield "groups of experts and the factor on scores are 1 here: set n_group, topk_group and routed_scaling_factor"
    if job.optimizer.weight_decay:
        yield "weight decay reaches norms and biases too"
    yield from rate_notes(job)


def _model_text(job: SystemJob) -> str:
    """`config.json` of a job's model, long enough for its samples."""
    config = dict(hugging_face_config(job.sizes) or {})
    if "max_position_embeddings" in config and not job.sizes.learned_positions:
        config["max_position_embeddings"] = job.sequence_length
    return json.dumps(config, indent=2) + "\n"
