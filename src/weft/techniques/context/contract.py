"""Context parallelism: its settings; predicted, not run yet.

Sources: ring attention, Liu et al. 2023 (arXiv 2310.01889); Ulysses, Jacobs et al. 2023 (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from weft.techniques.contract import Case, Technique
from weft.techniques.settings import setting

if TYPE_CHECKING:
    from weft.plan import Plan

ContextScheme = Literal["ring", "all_gather", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """The section `context_parallel`."""

    scheme: ContextScheme = setting("ring", layout="context_scheme", space="context_schemes")
    """`ring`: keys and values go round; `all_gather`: all are gathered at once; `ulysses`: heads are exchanged for
    positions."""


@final
class Context(Technique):
    """One sequence on several ranks."""

    name = "context parallelism"
    part = ContextSettings

    def unrunnable(self, plan: Plan) -> Iterator[str]:
        if plan.mesh.context > 1:
            yield (
                f"plan.mesh.context = {plan.mesh.context} can be predicted but not run yet: the engine has not got"
                " context parallelism. Use 1."
            )

    def check(self, case: Case) -> None:
        plan = case.plan
        if plan.mesh.context == 1 and plan.context_parallel.scheme != "ring":
            problem = 'has no effect with mesh.context = 1.\nUse "ring", or more context ranks.'
            raise case.refuse(("context_parallel", "scheme"), problem)
