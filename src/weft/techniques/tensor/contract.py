"""Tensor and sequence parallelism: which models they fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, final

from weft.config.plan import Plan
from weft.techniques.contract import Ablation, Case, Technique, list_choices
from weft.techniques.tensor.settings import TensorSettings


def _without_sequence(plan: Plan) -> Plan:
    return replace(plan, tensor_parallel=replace(plan.tensor_parallel, sequence=False))


def _without(plan: Plan) -> Plan:
    return _without_sequence(_without_grid(replace(plan, mesh=replace(plan.mesh, tensor=1))))


def _without_grid(plan: Plan) -> Plan:
    return replace(plan, tensor_parallel=replace(plan.tensor_parallel, scheme="1d"))


@final
class Tensor(Technique):
    """Matrices split over ranks."""

    name = "tensor parallelism"
    part = TensorSettings
    ablations = (
        Ablation("tensor ranks", _without, frees_ranks=True),
        Ablation("sequence parallelism", _without_sequence),
        Ablation("the grid of tensor ranks", _without_grid),
    )
    judged_alone = ("mesh.tensor", "tensor_parallel.sequence", "tensor_parallel.scheme")

    def runs(self, plan: Plan) -> bool:
        return plan.mesh.tensor > 1

    def sends(self, plan: Plan) -> bool:
        return plan.mesh.tensor > 1

    def needs_loop(self, plan: Plan) -> Iterator[str]:
        scheme = plan.tensor_parallel.scheme
        if scheme != "1d":
            yield (
                f'plan.tensor_parallel.scheme = "{scheme}" cannot be had in a loop of one\'s own, whose loss would need'
                ' the samples that a rank has. Use "1d", or `weft train`.'
            )

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
        scheme = plan.tensor_parallel.scheme
        if scheme != "1d":
            yield (
                f'plan.tensor_parallel.scheme = "{scheme}": torch\'s own tensor parallelism cuts a weight in one'
                ' dimension. Use "1d".'
            )

    def search_values(self, plan: Plan) -> Mapping[str, tuple[Any, ...]]:
        """Logits of a cube are whole when all sums over ranks are there."""
        return {"memory.fused_loss": (False,)} if plan.tensor_parallel.scheme == "3d" else {}

    def check(self, case: Case) -> None:
        if case.plan.tensor_parallel.scheme != "1d":
            from weft.techniques.tensor.mesh_2d.limits import check_grid  # loaded where a plan asks for a grid

            check_grid(case)
        if case.plan.tensor_parallel.sequence and case.plan.mesh.tensor == 1:
            problem = "has no effect with mesh.tensor = 1: the tensor ranks share the sequence.\nUse false."
            raise case.refuse(("tensor_parallel", "sequence"), problem)

    def check_model(self, case: Case) -> None:
        self._check_sequence(case)
        self._check_adapter(case)
        sizes, tensor, has_grid = case.facts.divisible, case.plan.mesh.tensor, case.plan.tensor_parallel.scheme != "1d"
        if has_grid:
            from weft.techniques.tensor.mesh_2d.limits import check_grid_model  # as above

            check_grid_model(case)
        if tensor > 1 and sizes != {} and (why := case.facts.why_not("tensor")):
            raise case.refuse(("mesh", "tensor"), f"cannot be had: {why}.\nMend model.split, leave it out, or use 1.")
        if has_grid or tensor == 1 or sizes is None or case.recipe.model.split:
            return  # A split table of one's own says itself what must divide; it is looked at when the model is built.
        if not sizes:
            why = case.facts.why_not("tensor") or f"a {case.facts.name} has no layers for the tensor axis"
            fix = "Use 1: data ranks share the model (plan.data_parallel.zero)."
            raise case.refuse(("mesh", "tensor"), f"has nothing to split: {why}.\n{fix}")
        wrong = {name: size for name, size in sizes.items() if size % tensor}
        if wrong:
            common = math.gcd(*sizes.values())
            choices = [n for n in range(1, common + 1) if common % n == 0]
            listed = ", ".join(f"{name} = {size}" for name, size in wrong.items())
            raise case.refuse(("mesh", "tensor"), f"does not divide {listed}.\nUse {list_choices(choices)}.")

    def _check_adapter(self, case: Case) -> None:
        """Where an adapter's pair stands, the sequence is whole."""
        if case.recipe.model.adapter is not None and case.plan.tensor_parallel.sequence:
            problem = "cannot be had with model.adapter: the narrow activation inside an adapter is not shared out."
            raise case.refuse(("tensor_parallel", "sequence"), f"{problem}\nUse false.")

    def _check_sequence(self, case: Case) -> None:
        facts, path = case.facts, ("tensor_parallel", "sequence")
        if not case.plan.tensor_parallel.sequence:
            return
        if reason := facts.why_not("blocks"):
            problem = f"needs to know where the blocks begin and end: {reason}.\nUse false."
            raise case.refuse(path, problem)
        if reason := facts.why_not("sequence"):
            raise case.refuse(path, f"cannot be had for this model: {reason}.\nUse false.")
        if facts.num_blocks is not None and facts.sequence_length is None:
            problem = f"has no sequence to split: samples of a {facts.name} are no sequences.\nUse false."
            raise case.refuse(path, problem)
