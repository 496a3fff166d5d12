"""The contract of a family's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from weft.config.recipe import HF_KEYS

if TYPE_CHECKING:
    from weft.model.families._tables import Tables
    from weft.model.profile import ModelSizes

Config = Mapping[str, Any]
"""A `config.json` as it is written: what it leaves out has the family's default."""


class Family:
    """A family of models of `transformers`: a file `weft/model/families/<model_type>.py` with an instance called
    `FAMILY`.

    It says only what looking at a model does not tell, by names and numbers, without torch.  Everything else (sizes of
    layers, costs, profiles, facts, small forms for checks) follows from that or from the model that is built.  What the
    file says is tested against models as built, like everything that is found in this folder (`tests/model/families`).
    """

    model_types: ClassVar[tuple[str, ...]]
    """`model_type` of the configurations that it reads; the first is the name of the file."""
    task: ClassVar[Literal["causal_lm", "masked_lm"]] = "causal_lm"
    """The task of its models where the configuration names no architecture."""

    router: ClassVar[str] = ""
    """Glob over the routers of its mixtures, which return logits, weights and choices; empty: it has none."""
    scoring: ClassVar[Literal["softmax", "sigmoid"]] = "softmax"
    """How its routers make scores of logits."""

    def sizes(self, config: Config) -> ModelSizes:
        """Return the numbers of the transformer; `sequence_length` is the longest that it can take.

        Raises:
            KeyError: a size that has no default is missing.
        """
        raise NotImplementedError

    def tables(self, config: Config, sizes: ModelSizes) -> Tables:
        """Return how it splits and where it is cut.  `divisible` is left to the sizes."""
        raise NotImplementedError

    def named(self, size: str) -> str:
        """The key of a configuration that holds a size of `Profile.divisible`, for messages."""
        return HF_KEYS[size][0] if size in HF_KEYS else size

    def has_windows(self, config: Config) -> bool:
        """Whether some layer looks through a sliding window: its masks are then transformers' own."""
        return False

    def no_shared_sequence(self, config: Config) -> str:
        """Why ranks cannot share the sequence of a sample, as far as the configuration tells: a sentence without its
        end; empty: nothing of this is against it."""
        from weft.model.families._sequences import no_shared_sequence  # a rank of another model loads none of it

        return no_shared_sequence(config)

    def prepare(self, config: Any) -> None:
        """Change the library's configuration before the model is constructed from it."""

    def adapt(self, model: Any) -> None:
        """Change a model that has been constructed on the meta device, so that its tables hold."""

    def exported(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return weights under the names and shapes that `transformers` loads."""
        return dict(weights)
