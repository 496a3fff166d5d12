"""The policies of a script, as its command has them.  They are read without torch: a place is asked at once."""

from __future__ import annotations

from collections.abc import Sequence

from weft.config.document import Document, bind, lay_over, parse_overrides
from weft.config.recipe import OnFailure
from weft.errors import RecipeError


def policies_of(texts: Sequence[str], max_restarts: int | None) -> OnFailure:
    """Return the policies of `--on-failure killed=stop,hang_seconds=60` and `--max-restarts`.

    Raises:
        RecipeError: a policy is unknown or impossible.
    """
    settings = [setting for text in texts for setting in text.split(",") if setting]
    settings += [] if max_restarts is None else [f"max_restarts={max_restarts}"]
    overrides = parse_overrides([f"on_failure.{setting}" for setting in settings], ("on_failure",))
    policies = bind(OnFailure, lay_over(Document("on_failure", RecipeError, {}, {}), overrides, "--on-failure"))
    shrinking = [setting for setting in settings if setting.endswith("=shrink")]
    if shrinking:
        raise RecipeError(
            f"--on-failure {shrinking[0]}: Weft finds a plan for fewer ranks only where a recipe says what is trained."
            " Use restart or stop; weft replan RUN --plan PLAN lets a session go on with fewer ranks."
        )
    return policies
