"""How training goes: loss, rates, validation, and the load of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.events import format_loss
from weft.formatting import format_number
from weft.watch.run_record import RunRecord
from weft.watch.samples import newest_samples, samples_file
from weft.watch.store import StepRow
from weft.watch.views._blocks import Block, block, lines, note, number, plural, rounded, table, text
from weft.watch.views._common import step_marks

_MOST_SAMPLES = 8
_MOST_LETTERS = 2_000


def training(record: RunRecord, options: Mapping[str, str], others: Sequence[RunRecord] = ()) -> list[Block]:
    """Return the blocks of the page; `others` are the runs whose loss stands beside this one's."""
    rows = [row for row in record.steps if row.loss is not None]
    if not rows:
        return [note("Training", "No step has ended yet.")]
    shown = [_losses(record, rows, others)]
    validation = [event for event in record.events if event.get("kind") == "evaluation"]
    if validation:
        shown.append(_validation(validation))
    shown += _rates(record, rows)
    shown += [made for made in (_auxiliary(record), _experts(record), _samples(record)) if made]
    return shown


def _losses(record: RunRecord, rows: Sequence[StepRow], others: Sequence[RunRecord]) -> Block:
    first, last = rows[0], rows[-1]
    skipped = sum(row.skipped for row in record.steps)
    says = f"Loss of the global batch: {format_loss(first.loss or 0.0)} at step {first.step:,}, "
    says += f"{format_loss(last.loss or 0.0)} at step {last.step:,}"
    says += (
        f"; {plural(skipped, 'step')} skipped for a gradient that was not finite."
        if skipped
        else "; no step was skipped."
    )
    if not others:
        return lines(
            "Loss", says, [row.step for row in rows], {"loss": [row.loss for row in rows]}, marks=step_marks(record)
        )
    by_run = {each.name: {row.step: row.loss for row in each.steps} for each in (record, *others)}
    steps = sorted(set[int]().union(*by_run.values()))
    series = {name: [losses.get(step) for step in steps] for name, losses in by_run.items()}
    return lines("Loss, runs side by side", says, steps, series)


def _validation(validation: Sequence[Mapping[str, Any]]) -> Block:
    x = [int(event.get("step") or 0) for event in validation]
    losses = [event.get("validation_loss") for event in validation]
    known = [loss for loss in losses if loss is not None]
    says = f"Loss of the validation set, {plural(len(x), 'time')}" + (
        f": least {format_loss(min(known))}." if known else "."
    )
    return lines("Validation loss", says, x, {"validation loss": losses})


def _rates(record: RunRecord, rows: Sequence[StepRow]) -> list[Block]:
    x, last, marks = [row.step for row in rows], rows[-1], step_marks(record)
    shown = []
    if last.gradient_norm is not None:
        says = f"Norm of the whole gradient before clipping: {format_loss(last.gradient_norm)} now."
        shown.append(
            lines("Gradient norm", says, x, {"gradient norm": [row.gradient_norm for row in rows]}, marks=marks)
        )
    if last.learning_rate is not None:
        says = f"Rate of each step, of the first parameter group: {format_number(last.learning_rate)} now."
        shown.append(lines("Learning rate", says, x, {"learning rate": [row.learning_rate for row in rows]}))
    scales = {row.loss_scale for row in rows}
    if len(scales) > 1:
        says = "Factor on the loss that keeps small gradients of half precision; it halves where one overflows."
        shown.append(lines("Loss scale", says, x, {"loss scale": [row.loss_scale for row in rows]}))
    facts = record.facts
    if facts.tokens_per_sample and facts.samples_per_step:
        tokens = facts.tokens_per_sample * facts.samples_per_step
        rates = [tokens / row.seconds if row.seconds > 0 else None for row in rows]
        says = f"Tokens per second of the whole job, {format_number(tokens)} per step."
        shown.append(lines("Tokens per second", says, x, {"tokens/s": rates}))
    return shown


def _auxiliary(record: RunRecord) -> Block | None:
    names = list(dict.fromkeys(name for report in record.reports[-200:] for name in report.get("auxiliary") or {}))
    if not names:
        return None
    reports = [report for report in record.reports if report.get("auxiliary")]
    series = {name: [report["auxiliary"].get(name) for report in reports] for name in names[:8]}
    says = "Terms that are added to the loss, such as the balance of experts; unweighted, and not in the loss above."
    return lines("Auxiliary terms", says, [int(report["step"]) for report in reports], series)


def _samples(record: RunRecord) -> Block | None:
    """Return the texts that `weft generate` has made of the run's checkpoints, the newest first."""
    samples = newest_samples(samples_file(record.folder), _MOST_SAMPLES)
    if not samples:
        return None
    texts = [{"title": _about(each), "text": str(each["text"])[:_MOST_LETTERS]} for each in samples]
    says = f"What the model made of a prompt, by weft generate: {plural(len(texts), 'text')}, the newest first."
    return block("texts", "Generated texts", says, texts=texts, wraps=True)


def _about(sample: Mapping[str, Any]) -> str:
    settings = [f"{name.replace('_', ' ')} {sample[name]}" for name in ("temperature", "top_k", "top_p", "seed")
                if sample.get(name) is not None]  # fmt: skip
    return ", ".join([f"step {sample.get('step', 0):,}", *settings, f"prompt {str(sample.get('prompt', ''))[:60]!r}"])


def _experts(record: RunRecord) -> Block | None:
    """Return each expert's share of the choices, by router, of the newest report that has it."""
    report = next((report for report in reversed(record.reports) if report.get("load")), None)
    if report is None:
        return None
    load: Mapping[str, Sequence[float]] = report["load"]
    entropy: Mapping[str, float] = report.get("router_entropy") or {}
    routers = list(load)
    size = max(map(len, load.values()))
    values = [
        [rounded(100 * share) for share in load[router]] + [None] * (size - len(load[router])) for router in routers
    ]
    busiest = max(routers, key=lambda router: max(load[router], default=0.0) * len(load[router]))
    share = max(load[busiest], default=0.0)
    says = (
        f"Share of the choices that each expert had in step {report.get('step'):,}, by router. Most uneven is"
        f" {busiest}: one of {len(load[busiest])} experts has {100 * share:.3g} %,"
        f" even would be {100 / max(len(load[busiest]), 1):.3g} %."
    )
    columns = [
        text("router", routers),
        number("experts", [len(load[router]) for router in routers]),
        number("most", [100 * max(load[router], default=0.0) for router in routers], unit="%"),
        number("least", [100 * min(load[router], default=0.0) for router in routers], unit="%"),
        number("entropy", [entropy.get(router) for router in routers], unit="nats"),
    ]
    most = 100 * max((max(shares, default=0.0) for shares in load.values()), default=0.01)
    return block(
        "heat", "Load of experts", says, table(columns), x=list(range(size)), x_name="expert", rows=routers,
        about=[""] * len(routers), unit="%", low=0.0, high=most, firsts=[], cuts=[], values=values,
    )  # fmt: skip
