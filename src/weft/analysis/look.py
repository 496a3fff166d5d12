"""Gives a model without a split table the one that looking at it shows, or the reason why there is none."""

from __future__ import annotations

from weft.analysis.tensor_split.proposal import Proposal
from weft.analysis.tensor_split.propose import propose_split
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint
from weft.model.families import found_split_note

_SHOWN = 2
"""Reasons in a sentence."""


def look(blueprint: Blueprint) -> None:
    """Split a model as its forward allows, behind the rules that it has; never raises for what the model does.

    Where nothing can be split, the limit `tensor` says why.  Every process finds the same, for the analysis depends on
    the model alone.
    """
    try:
        proposal = propose_split(blueprint)
    except RecipeError as problem:
        _leave_unsplit(blueprint, _first_sentence(str(problem)))
        return
    except Exception as problem:  # a forward may do what no rule of the analysis foresaw: no table, and no failure
        said = next(iter(str(problem).splitlines()), "")
        _leave_unsplit(blueprint, f"looking at its forward failed ({type(problem).__name__}: {said})")
        return
    proposal.apply_to(blueprint)
    if proposal.splits:
        blueprint.notes = (*blueprint.notes, found_split_note(proposed.rule for proposed in proposal.rules))
    elif not blueprint.splits:
        blueprint.limit("tensor", why_unsplit(proposal))


def _leave_unsplit(blueprint: Blueprint, reason: str) -> None:
    """Leave modules that no rule covers unsplit; of a model without rules that divide anything, that is all."""
    if not blueprint.splits:
        blueprint.limit("tensor", reason)


def why_unsplit(proposal: Proposal) -> str:
    """Why nothing can be split: the modules, and what about them stands in the way.  A sentence without its end."""
    reasons = [f"{name}: {reason}" for name, reason in proposal.replicated]
    if not reasons:
        return "no linear layer of it feeds another by way of parts"
    more = f"; and {len(reasons) - _SHOWN} more (`weft describe`)" if len(reasons) > _SHOWN else ""
    return "no layer of it can be split: " + "; ".join(reasons[:_SHOWN]) + more


def _first_sentence(text: str) -> str:
    """Return a message without the change to make, which is about describing the model and not about the plan."""
    return text.splitlines()[0].split(". ")[0].rstrip(".")
