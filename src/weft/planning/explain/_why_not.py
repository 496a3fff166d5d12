"""`--why-not "tensor=8"`: what a choice costs, or why it cannot be, and what would have to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.formatting import format_seconds
from weft.planning.explain._settings import QuestionSetting, apply_settings, parse_settings
from weft.planning.explain._text import (
    difference_line,
    differences,
    format_change,
    imbalance_line,
    layout_line,
    memory_parts,
)
from weft.planning.price import CostModel, Prediction, check_layout
from weft.planning.search import Acceptance, Candidate, SearchResult, search
from weft.techniques.cost_terms import Layout
from weft.techniques.registry import lighter_settings

_GIBI = 2**30
_MOST_FIXES = 3
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class _Question:
    result: SearchResult
    cost_model: CostModel
    settings: Sequence[QuestionSetting]

    @property
    def text(self) -> str:
        return ", ".join(setting.text for setting in self.settings)

    def with_settings(self, layout: Layout) -> Layout:
        devices, batch = self.result.cluster.num_devices, self.result.global_batch_size
        return apply_settings(self.settings, layout, devices=devices, global_batch_size=batch)

    def problems(self, layout: Layout) -> list[str]:
        """Why a layout cannot be: it makes no sense, or a training of the model refuses its plan."""
        result = self.result
        if idle := [why for setting in self.settings if (why := setting.idle_in(layout))]:
            return idle
        problems = check_layout(result.profile, result.cluster, layout)
        if not problems:
            refusal = Acceptance(self.cost_model, result.space, result.global_batch_size).problem(layout)
            problems = [" ".join(refusal.splitlines())] if refusal else []
        return problems


def explain_choice(result: SearchResult, cost_model: CostModel, question: str) -> list[str]:
    """Answer why the best plan of a search does not have some settings.

    Says what the plan would take with them and nothing else changed, or why that cannot be; the smallest further
    changes with which it fits; and the best plan that has them, found by a search among those alone.

    Args:
        cost_model: the one of the search, or one like it.
        question: such as `tensor=8` or `pipeline=4, recompute=full`.

    Raises:
        PlanError: the question names no setting, or nothing was found that it could be compared with.
    """
    settings = parse_settings(question)
    if not result.best:
        raise PlanError("nothing fits on this cluster, so there is no plan to compare with. Use more devices.")
    best, case = result.best[0], _Question(result, cost_model, settings)
    if all(setting.of(best.layout) == setting.value for setting in settings):
        return [f"{case.text} is what the best plan has."]
    # Two answers: the best plan with only this changed, and the best plan that has it. The second is left out where the
    # first is as good.
    alone = _alone(case, best)
    asked = next((setting.value for setting in settings if setting.name == "expert"), 1)
    assumed = imbalance_line(replace(best.layout, expert=asked), result.calibration, result.framework)
    said = [f"Prices assume: {assumed}."] if assumed else []
    return [*_changed_alone(case, best), *_best_with(case, best, alone), *said]


def _alone(case: _Question, best: Candidate) -> float:
    """Step seconds of the best plan with nothing but the settings changed; infinite where that cannot be."""
    layout = case.with_settings(best.layout)
    if case.problems(layout):
        return math.inf
    prediction = case.cost_model.predict(layout, exact=True)
    return prediction.step_seconds if prediction.fits else math.inf


def _changed_alone(case: _Question, best: Candidate) -> Iterator[str]:
    layout = case.with_settings(best.layout)
    problems = case.problems(layout)
    if problems:
        yield f"{case.text} cannot be changed alone: {' '.join(problems)}"
        return
    prediction = case.cost_model.predict(layout, exact=True)
    if prediction.fits:
        yield _cost(f"{case.text} and nothing else changed would take", best, layout, prediction)
        return
    yield _too_much(case.text, prediction)
    fixes = [_fix(best, words, found) for words, found in _fitting(case, layout)][:_MOST_FIXES]
    yield f"Smallest changes that fit: {', or '.join(fixes)}." if fixes else "No single further change makes it fit."


def _best_with(case: _Question, best: Candidate, alone: float) -> Iterator[str]:
    """`alone`: step seconds of the plan with nothing else changed; a search that finds nothing faster is not told."""
    space = case.result.space
    for setting in case.settings:
        space = setting.fixed(space)
    for setting in case.settings:
        space = setting.with_ranks(space)
    answer = search(
        case.result.profile,
        case.result.cluster,
        global_batch_size=case.result.global_batch_size,
        objective=case.result.objective,
        space=space,
        framework=case.cost_model.framework,
        calibration=case.cost_model.calibration,
        cost_model=case.cost_model,
        top=1,
    )
    if not answer.best:
        commonest = " ".join(next(iter(answer.counts.refused), "").splitlines())
        if alone == math.inf and answer.counts.refused:
            yield f"No plan with {case.text} that fits can be trained, whatever else is changed: {commonest}"
        elif alone == math.inf:
            yield f"No plan with {case.text} fits, whatever else is changed."
        return
    rival = answer.best[0]
    # The restricted search looks at fewer plans, so it can only find a better one where the first search missed it.
    if rival.score < best.score * (1.0 - _ROUNDING):
        yield (
            f"The search without {case.text} missed the best plan, which has it: take the plan below in place of the"
            f" one above, by giving {case.text} to the search (--set)."
        )
    if rival.prediction.step_seconds >= alone:
        return
    yield _cost(
        f"The best plan with {case.text} ({layout_line(rival.layout)}) takes", best, rival.layout, rival.prediction
    )


def _cost(start: str, best: Candidate, layout: Layout, prediction: Prediction) -> str:
    """Compare step times of one global batch."""
    mine, theirs = best.prediction.time, prediction.time
    ratio = prediction.step_seconds / best.prediction.step_seconds
    text = f"{start} {format_seconds(prediction.step_seconds)}, {format_change(ratio)} the best plan's "
    text += format_seconds(best.prediction.step_seconds)
    if layout.world_size != best.layout.world_size:
        text += f", on {layout.world_size:,} devices instead of {best.layout.world_size:,}"
    pairs = differences(mine, theirs)
    return f"{text}: {difference_line(pairs, mine.total)}." if pairs else f"{text}."


def _too_much(text: str, prediction: Prediction) -> str:
    fullest = prediction.fullest
    over = fullest.device - prediction.usable_bytes
    parts = sorted(memory_parts(fullest.kinds), key=lambda pair: -pair[1])[:2]
    listed = ", ".join(f"{word} {size / _GIBI:.1f}" for word, size in parts)
    need = f"needs {fullest.device / _GIBI:.1f} GiB on pipeline rank {fullest.rank} ({listed})"
    margin = prediction.margin_bytes / _GIBI
    return f"{text} {need}: {over / _GIBI:.1f} GiB too much beside {margin:.1f} GiB of margin."


def _fitting(case: _Question, layout: Layout) -> list[tuple[str, Prediction]]:
    """Single further changes under which the layout fits, the fastest first."""
    fixed = {setting.name for setting in case.settings}
    fitting: list[tuple[str, Prediction]] = []
    for name, text, changed in _further(layout):
        if name in fixed:
            continue
        (further,) = parse_settings(text)
        changed = _Question(case.result, case.cost_model, (further,)).with_settings(changed)
        if not further.allowed(case.result.space) or case.problems(changed):
            continue
        prediction = case.cost_model.predict(changed, exact=True)
        if prediction.fits:
            fitting.append((text, prediction))
    return sorted(fitting, key=lambda pair: pair[1].step_seconds)


def _further(layout: Layout) -> Iterator[tuple[str, str, Layout]]:
    """(setting, text, layout) of changes that save memory."""
    for text in lighter_settings(layout):
        yield text.partition("=")[0], text, layout
    for factor in (2, 4):
        yield "tensor", f"tensor={layout.tensor * factor}", layout
        yield "pipeline", f"pipeline={layout.pipeline * factor}", layout
        yield "context", f"context={layout.context * factor}", layout
    if layout.microbatch_size % 2 == 0:
        yield "size", f"size={layout.microbatch_size // 2}", layout
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield "sequence", "sequence=true", replace(layout, sequence_parallel=True)


def _fix(best: Candidate, words: str, prediction: Prediction) -> str:
    name, _, value = words.partition("=")
    ratio = prediction.step_seconds / best.prediction.step_seconds
    size = prediction.fullest.device / _GIBI
    return f"{name} = {value} ({size:.1f} GiB, {format_change(ratio)} the best plan)"
