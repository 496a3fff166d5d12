"""Explains the best plan of `weft plan`: its time, its memory, and answers to the questions that were asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from weft.cli._options import FLAG
from weft.cli._subject import Subject, need_sizes
from weft.errors import PlanError

if TYPE_CHECKING:
    from weft.planning.learned import Learned
    from weft.planning.price import CostModel
    from weft.planning.search import SearchResult


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The options of `weft plan` about the best plan."""

    why_not: str | None = None
    """Settings that the best plan does not have, such as tensor=8: what they cost, or why they cannot be."""
    next: Annotated[bool, FLAG] = False
    """Print the changes that would help most beyond the best plan: a larger batch, faster links, more memory."""
    emit: str | None = None
    """Print how to start the best plan elsewhere: megatron, torchtitan, deepspeed or accelerate."""
    plots: Path | None = None
    """Folder for pictures of the best plan: time, memory, schedule, map."""

    @property
    def are_asked(self) -> bool:
        return any(self.given.values())

    @property
    def given(self) -> dict[str, object]:
        """Option → its value."""
        return {"--why-not": self.why_not, "--next": self.next, "--emit": self.emit, "--plots": self.plots}


def answer_lines(result: SearchResult, questions: Questions, subject: Subject, learned: Learned) -> list[str]:
    """Return the lines below the table: time and memory of the best plan, and an answer to every question.

    Raises:
        PlanError: a question that cannot be answered; nothing fits, and something was asked about the best plan.
    """
    if not result.best:
        if questions.are_asked:
            raise PlanError("no plan fits into memory, so there is none to explain. Use more devices.")
        return []
    return list(_lines(result, questions, subject, learned))


def _lines(result: SearchResult, questions: Questions, subject: Subject, learned: Learned) -> Iterator[str]:
    from weft.planning.explain import explain_choice, imbalance_line, learned_lines, memory_line, time_line
    from weft.planning.price import CostModel, accuracy

    best = result.best[0]
    yield f"time      {time_line(best.prediction.time)}"
    for index, line in enumerate(learned_lines(result, learned)):
        yield f"{'' if index else 'learned':<10}{line}"
    yield f"memory    {memory_line(best.prediction)}"
    if assumed := imbalance_line(best.layout, result.calibration, result.framework):
        yield f"assumed   {assumed}"
    if result.cluster.has_accelerators:
        yield f"accuracy  {accuracy().line}"
    if not questions.are_asked:
        return
    cost_model = CostModel(result.profile, result.cluster, result.framework, result.calibration)
    if questions.next:
        yield from _next_lines(result, cost_model)
    if questions.why_not:
        yield from _block("why not", explain_choice(result, cost_model, questions.why_not))
    if questions.emit:
        yield ""
        yield _emitted(result, questions.emit, subject)
    if questions.plots:
        yield from _drawn(result, cost_model, questions.plots)


def _next_lines(result: SearchResult, cost_model: CostModel) -> Iterator[str]:
    from weft.planning.explain import next_changes

    yield from _block("next", [change.line for change in next_changes(result, cost_model)])


def _block(label: str, lines: list[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        yield f"{label if index == 0 else '':<10}{line}"


def _emitted(result: SearchResult, name: str, subject: Subject) -> str:
    from weft.interop.systems import emission_lines, emit, find_system, job_of

    system = find_system(name, "--emit")
    sizes = need_sizes(subject)
    job = job_of(result, result.best[0], sizes, optimizer=subject.optimizer, steps=subject.steps)
    return "\n".join(emission_lines(emit(system, job), system.facts))


def _drawn(result: SearchResult, cost_model: CostModel, folder: Path) -> Iterator[str]:
    from weft.planning.explain import PICTURES, draw

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"--plots {folder}: {error.strerror}. Name a folder you may write.") from None
    layout = result.best[0].layout
    prediction = cost_model.predict(layout, spans=True)
    for name in PICTURES:
        draw(name, folder / f"{name}.png", prediction, layout, result.cluster)
    yield f"pictures  {', '.join(f'{name}.png' for name in PICTURES)} in {folder}"
