"""What predictions know: nothing but data sheets, or constants fitted on published runs, which ship as data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published._factors import FACTORS, with_factors
from weft.config.document import dump
from weft.techniques.cost_terms import DATASHEET, FITTED, Calibration

FACTORS_FITTED = Path(__file__).parent / "data" / "fitted.toml"
"""What a fit found: factors and scalars of stacks.  The constants that follow from the factors ship with Weft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackScalar:
    """What was fitted for one framework."""

    slowdown: float
    """Measured over predicted step time."""
    spread: float
    """Standard deviation of log(measured / predicted) that is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What predictions may know besides the row."""

    calibration: Calibration
    stacks: Mapping[str, StackScalar]
    unseen: StackScalar
    """Values for stacks of which no measurement was published."""

    def scalar(self, framework: str) -> StackScalar:
        return self.stacks.get(framework, self.unseen)


def datasheet_knowledge() -> Knowledge:
    """Nothing learnt from training runs."""
    return Knowledge(calibration=DATASHEET, stacks={}, unseen=StackScalar(slowdown=1.0, spread=0.2))


def fitted_knowledge() -> Knowledge:
    """Constants and scalars of stacks as fitted on published runs; the file says how and when."""
    document = tomllib.loads(FACTORS_FITTED.read_text(encoding="utf-8"))
    return Knowledge(
        calibration=FITTED,
        stacks={name: _scalar(found) for name, found in document["stacks"].items()},
        unseen=_scalar(document["unseen"]),
    )


def _scalar(found: Mapping[str, Any]) -> StackScalar:
    return StackScalar(slowdown=found["slowdown"], spread=found["spread"])


def dump_knowledge(knowledge: Knowledge, factors: Mapping[str, float], told: Sequence[str]) -> str:
    """Return the TOML that `fitted_knowledge` reads.  `told` says how and when it was made."""
    lines = [
        *(f"# {line}" for line in told),
        "",
        "# Over the data sheet's constants (weft.techniques.cost_terms.DATASHEET).",
        "[factors]",
    ]
    lines += [f"{name} = {factors[name]:.4g}" for name in FACTORS]
    lines += [
        "",
        "# Measured over predicted step time, and the spread of its logarithm, of a framework that is not listed.",
    ]
    lines += ["[unseen]", *_spelled(knowledge.unseen), "", "# The same by framework and year."]
    for name in sorted(knowledge.stacks):
        lines += [f'[stacks."{name}"]', *_spelled(knowledge.stacks[name]), ""]
    return "\n".join(lines).rstrip() + "\n"


def dump_constants(knowledge: str, told: Sequence[str]) -> str:
    """Return the TOML of the constants that follow from what was found (`dump_knowledge`)."""
    calibration = with_factors(DATASHEET, tomllib.loads(knowledge)["factors"], name="fitted")
    return dump(calibration, header=told, everything=True, descriptions=False)


def _spelled(scalar: StackScalar) -> tuple[str, str]:
    return f"slowdown = {scalar.slowdown:.4g}", f"spread = {scalar.spread:.3g}"
