"""Settings of a session's plan beside a file or `auto`: single settings, how often a rank accumulates, and how many
steps it may take by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.config.plan import Plan, load_plan, plan_settings, with_settings
from weft.errors import PlanError
from weft.techniques.registry import of_keyword

_SETTINGS = "weft.session(settings=…)"
_NUMBER = "weft.session(microbatches=…)"
_LOCAL = "weft.session(local_steps=…)"
_DATA_ONLY = ("mesh.tensor", "mesh.pipeline")
"""Settings that `auto` leaves alone: a loop may call the model by itself, or several models that must share their
batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of the plan by dotted key, microbatches of a rank in a step (None: as the plan has it), and the most
    steps that replicas may take by themselves."""

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    microbatches: int | None = None
    local_steps: int = 0

    @property
    def most_local_steps(self) -> int:
        """Return the most local steps that the recipe permits.

        Raises:
            PlanError: it is no number.
        """
        if type(self.local_steps) is not int or self.local_steps < 0:
            raise PlanError(f"{_LOCAL} = {self.local_steps!r} is no number of steps. Give a whole number from 0 on.")
        return self.local_steps

    def over(self, plan: Plan) -> Plan:
        """A plan of the user's own with the settings laid over it.

        Raises:
            PlanError: a setting is unknown or impossible.
        """
        return with_settings(plan, self.settings, _SETTINGS) if self.settings else plan

    def pins(self, batch_size: int, world_size: int) -> Plan:
        """A plan whose `origins` name what a search must leave as it is, for a global batch on so many ranks.

        Raises:
            PlanError: a setting is unknown or impossible, or the batch cannot be accumulated so.
        """
        for key in self.settings.keys() & set(_DATA_ONLY):
            raise PlanError(
                f"{_SETTINGS}: {key} splits the model, and a session's auto splits the data only. Give a whole plan:"
                f" weft.session({key.partition('.')[2]}={self.settings[key]!r})."
            )
        for setting in plan_settings():
            if setting.knob.follows and setting.key in self.settings:
                instead = "microbatches=" if setting.key == "microbatch.per_step" else f"{setting.knob.follows!r}"
                raise PlanError(
                    f"{_SETTINGS}: {setting.key} follows from what auto chooses. Give {instead}, or a whole plan."
                )
        plan = Plan(origins=dict.fromkeys(_DATA_ONLY, "a session's auto splits the data only"))
        plan = self._laid_over(plan, world_size)
        if self.microbatches is None:
            return plan
        if "microbatch.size" in plan.origins:
            raise PlanError(f"{_NUMBER} and settings of microbatch.size say the same twice. Leave one out.")
        size = self._microbatch(batch_size, world_size)
        plan = replace(plan, microbatch=replace(plan.microbatch, size=size))
        return replace(plan, origins={**plan.origins, "microbatch.size": _NUMBER})

    def _laid_over(self, plan: Plan, world_size: int) -> Plan:
        """A plan with the settings.  How many replicas average is a part of the mathematics, so under local steps that
        is not for a search to choose: every data rank is one, unless the settings make replicas of several."""
        settings, local = dict(self.settings), dict[str, Any]()
        rounds = of_keyword("local_steps", self.local_steps) if self.local_steps else {}
        length = next(iter(rounds), "")
        if self.local_steps and world_size == 1:
            settings = {key: value for key, value in settings.items() if key not in rounds}
        elif self.local_steps and settings.get(length) != 0:
            shard = settings.get("mesh.shard", 1)
            local |= rounds
            local["mesh.replicate"] = world_size // shard if isinstance(shard, int) and shard > 0 else 1
            local = {key: value for key, value in local.items() if key not in settings}
        plan = with_settings(plan, local | settings, _SETTINGS) if local | settings else plan
        origins = dict.fromkeys(local, _LOCAL)
        if self.local_steps and world_size == 1:
            origins[length] = f"{_LOCAL}: one process has nobody to average with"
        return replace(plan, origins={**plan.origins, **origins})

    def _microbatch(self, batch_size: int, ranks: int) -> int:
        number = self.microbatches
        if type(number) is not int or number < 1:
            raise PlanError(f"{_NUMBER} = {number!r} is no number of microbatches. Give a whole number from 1 on.")
        size, rest = divmod(batch_size, ranks * number)
        if rest or not size:
            fitting = [other for other in range(1, batch_size + 1) if batch_size % (ranks * other) == 0]
            fix = (
                f"Use microbatches={min(fitting, key=lambda other: abs(other - number))}"
                if fitting
                else "Use a batch size that it divides"
            )
            raise PlanError(
                f"{_NUMBER} = {number} on {ranks} data rank{'s' * (ranks > 1)} does not divide the global batch of"
                f" {batch_size}. {fix}."
            )
        return size

    def beyond(self, plan: Plan) -> Plan:
        """Return the chosen plan with the settings that search does not choose (compile, threads)."""
        plan = self._laid_over(plan, plan.mesh.world_size)
        if self.microbatches is None:
            return plan
        return replace(plan, origins={**plan.origins, "microbatch.size": _NUMBER})


def session_arguments(plan: Plan | str | Path, seconds: float | None = None) -> dict[str, Any]:
    """Return the arguments of `weft.session` that run a plan, and permit what it names; `seconds`: how long ranks wait
    for one another, None: as the plan says.

    Raises:
        PlanError: it cannot be read.
    """
    waits: dict[str, Any] = {} if seconds is None else {"collective_timeout_seconds": float(seconds)}
    if plan == "auto":
        return waits
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    data, precision = plan.data_parallel, plan.compute.precision
    return {
        **waits,
        "plan": plan,
        **({"permit": ("fp32", precision)} if precision != "fp32" else {}),
        **({"compression": (data.compression,)} if data.compression != "none" else {}),
        **({"local_steps": data.round_length} if data.round_length else {}),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyChecks:
    """The safety checks that are on. All are, but in tests of what another one finds."""

    changed_state: bool = True
    """State that a forward or a loss changes by itself is looked for."""
    coupled_samples: bool = True
    """Samples of a batch that a forward or a loss lets meet are looked for."""
    edits: bool = True
    """Whether writes of a loop into the weights between steps are looked for."""
    data: bool = True
    """Subsets and a few samples of the data are compared over the ranks."""
