"""A proof in words: the line of one that holds, and what is likely wrong where one does not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from weft.config.plan import Plan
from weft.errors import WeftError
from weft.run.engine.proof._compare import Deviation, Verdict

_ANYWAY = 'To train all the same, prove = "never".'


def line_of(verdict: Verdict, seconds: float, *, kept: bool) -> str:
    """The line of a proof that holds."""
    stays = ", kept for the next start" if kept else ""
    return (
        f"proof     two steps equal plain PyTorch: largest relative difference {verdict.largest:.1e} over"
        f" {verdict.num_tensors} tensors  ({seconds:.1f} s{stays})"
    )


def difference_of(verdict: Verdict, plan: Plan, owners: Mapping[str, str]) -> str:
    """Return a sentence on the first deviation: its tensor, its module, its likely cause, and the change to make.

    `owners` maps the name of each module to its class.
    """
    first = verdict.deviations[0]
    others = len(verdict.deviations) - 1
    more = f" ({others} more differ{'s' if others == 1 else ''})" if others else ""
    return (
        f"two steps under this plan are not those of plain PyTorch: {_what(first, owners)}{more}."
        f" {_likely(verdict.deviations, plan)} {_ANYWAY}"
    )


def failure_of(error: Exception, plan: Plan) -> str:
    """Return a sentence on the error of a step under the plan, where plain PyTorch raises none."""
    said = (str(error).splitlines() or [""])[0]
    return (
        f"plain PyTorch takes two steps on this model, and a step under this plan ({_axes(plan)}) raises"
        f" {type(error).__name__}: {said.rstrip('.')}. {_way_out(said, plan)}"
    )


def _way_out(said: str, plan: Plan) -> str:
    """The change to make where a step fails."""
    if "dtype" in said:
        return (
            f"The plan computes the whole model in {plan.compute.precision}: cast to the dtype of a weight"
            " (x.to(self.layer.weight.dtype)) and not to one by name, or keep one dtype in the whole model."
        )
    return f"Change what raises it, or use a plan without {_axes(plan)}."


def is_of_plan(error: Exception) -> bool:
    """Whether a step failed for the plan's sake, as far as one can tell: torch or Weft raised, not the user's code."""
    if isinstance(error, WeftError):
        return False  # says what is wrong in its own words
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    module = "" if innermost is None else str(innermost.tb_frame.f_globals.get("__name__", ""))
    return isinstance(error, RuntimeError) or module.partition(".")[0] in ("torch", "weft")


def _what(deviation: Deviation, owners: Mapping[str, str]) -> str:
    """Return the deviation in words, with its size."""
    by = "" if math.isinf(deviation.relative) else f" by {deviation.relative:.1e} (limit {deviation.limit:.1e})"
    match deviation.kind:
        case "draws":
            where = deviation.name or "the forward"
            return f"two calls of {where} in one forward draw the same numbers"
        case "dtype":
            return f"the buffer {deviation.name}{_owner(deviation.name, owners)} has another dtype"
        case "loss":
            return f"the loss of {deviation.name} differs{by}"
        case "held":
            return f"{deviation.name.removeprefix('model.')}, which the model or the loss holds, differs{by}"
        case _:
            names = {"gradient": "the gradient of ", "buffer": "the buffer ", "weight": "after two steps the weight "}
            return f"{names[deviation.kind]}{deviation.name}{_owner(deviation.name, owners)} differs{by}"


def _owner(name: str, owners: Mapping[str, str]) -> str:
    kind = owners.get(name.rpartition(".")[0])
    return f" (of {kind})" if kind else ""


def _likely(deviations: Sequence[Deviation], plan: Plan) -> str:
    """The likely kind, and what to do."""
    kinds = {deviation.kind for deviation in deviations}
    first_loss = any(deviation.kind == "loss" and deviation.name == "step 1" for deviation in deviations)
    shared = plan.mesh.data * plan.mesh.context > 1 or plan.microbatch.is_split
    cut = plan.mesh.tensor > 1 or plan.data_parallel.shards_weights or plan.mesh.pipeline > 1
    lost = [m.name for m in deviations if m.kind == "gradient" and m.name.startswith("loss.")]
    if "draws" in kinds:
        return "Give each call a dropout module of its own."
    if "dtype" in kinds:
        return "Keep the tensor in the dtype of the plan's precision, or permit the precision that it has."
    if lost:
        return (
            f"The loss has parameters of its own ({lost[0]}), whose gradients are not summed over ranks. Make the loss"
            " a part of the model."
        )
    if first_loss and shared:
        return (
            "Likely samples meet: the forward or the loss computes one sample's part from others (a mean over the"
            " batch, pairs of samples). Train on one process with the whole batch in one microbatch; where the loss"
            " alone does so, say that it needs the whole batch: loss.per_sample = False."
        )
    if first_loss and cut:
        return (
            "Likely the loss or the forward reads a weight outside of the module that has it, and sees this rank's"
            " part. Use mesh.tensor = 1 and data_parallel.zero = 0, 1 or 2, which leave weights whole."
        )
    if "gradient" in kinds and cut:
        return (
            "Likely a derivative of a derivative (a gradient penalty), or a weight that is read outside of its module."
            " Use mesh.tensor = 1 and data_parallel.zero = 0, 1 or 2."
        )
    if kinds <= {"buffer", "held", "weight", "loss"} and shared:
        return (
            "Likely a forward leaves something behind that depends on its own samples (statistics, a code book, norms"
            " that are renewed). Train on one process with the whole batch in one microbatch, or keep it fixed."
        )
    return "Weft computes this model otherwise; please report it with this message."


def _axes(plan: Plan) -> str:
    sizes = {name: getattr(plan.mesh, name) for name in ("pipeline", "data", "context", "tensor", "expert")}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["one process"]
    return ", ".join([*parts, "weights cut over data ranks"] if plan.data_parallel.shards_weights else parts)
