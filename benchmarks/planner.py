"""Predict published runs, fit the planner to them, and draw its predictions beside the measurements.

python -m benchmarks.planner validate FILE.csv   predicts a file's runs, and says how far off that is
python -m benchmarks.planner fit                 writes what it finds beside the runs, and the constants that ship
                                                 (src/weft/techniques/cost_terms/fitted.toml), in about a minute
python -m benchmarks.planner report              writes docs/notebook/planner-accuracy.md, docs/pictures/planner-*.png
                                                 and the figures that ship with Weft, in about three minutes
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published import (
    FACTORS_FITTED,
    PUBLISHED_RUNS,
    Mode,
    Validation,
    accuracy_of,
    dump_accuracy,
    dump_constants,
    dump_forecasts,
    dump_knowledge,
    fit,
    predictable_samples,
    read_rows,
    report_of,
    show,
    validate,
)
from weft.errors import DataError, WeftError

ROOT = Path(__file__).parents[1]
_PRICE = ROOT / "src/weft/planning/price"
_TERMS = ROOT / "src/weft/techniques/cost_terms"
_PAGE = ROOT / "docs/notebook/planner-accuracy.md"
_PICTURES = ROOT / "docs/pictures"
_HEAD = """# How well the planner predicts

Written by `python -m benchmarks.planner report` from the published runs in `benchmarks/published/data`; do not edit.
[The planner](../concepts/planner.md) says how predictions are made, what the columns mean, and why some families are
off."""
_LARGE = 10
"""Families with fewer timed rows share one colour."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the three; return 0, or 2 for what the caller can mend, in one paragraph."""
    options = _parser().parse_args(arguments)
    try:
        if options.what == "fit":
            write_fit(options.file)
        elif options.what == "report":
            write_report(options.file)
        else:
            show_validation(options)
    except WeftError as error:
        print(error, file=sys.stderr)
        return error.status
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="what", required=True)
    for verb, about in (("fit", "fit the constants"), ("report", "write page, pictures and figures")):
        verbs.add_parser(verb, help=about).add_argument("--file", type=Path, default=PUBLISHED_RUNS)
    one = verbs.add_parser("validate", help="predict the runs of a file")
    one.add_argument("file", type=Path, help="CSV file: one run a line, with its layout and what was measured")
    knows = "what predictions know: data sheets alone, or the shipped constants; neither learns from FILE"
    one.add_argument("--mode", choices=("datasheet", "fitted"), default="fitted", help=knows)
    one.add_argument("--json", type=Path, help="file to write the predictions to")
    one.add_argument("--cross-validate", action="store_true", help="fit anew for each source, on all the others")
    one.add_argument("--few-shot", type=int, default=0, help="rows of each source that set its scalar, unscored")
    return parser


def show_validation(options: argparse.Namespace) -> None:
    """Predict a file's runs, print the report, and write the predictions where asked."""
    validation = validate(options.file, options.mode, cross_validate=options.cross_validate, few_shot=options.few_shot)
    if options.json is not None:
        try:
            options.json.write_text(dump_forecasts(validation))
        except OSError as error:
            raise DataError(f"{options.json} cannot be written: {error.strerror}. Name a file you may write.") from None
    show(report_of(validation))


def write_fit(path: Path) -> None:
    """Fit on all families and write the constants."""
    rows = read_rows(path)
    samples = predictable_samples(rows)
    fitted = fit(samples)
    told = [
        "Written by `python -m benchmarks.planner fit`; do not edit.",
        f"Fitted {datetime.date.today().isoformat()} on {len(fitted.samples)} of the {len(samples)} timed rows of"
        f" {path.name}: at most 16 of each of {len({sample.family for sample in samples})} families.",
    ]
    found = dump_knowledge(fitted.knowledge, fitted.factors, told)
    FACTORS_FITTED.write_text(found)
    (_TERMS / "fitted.toml").write_text(dump_constants(found, told))
    print(f"{FACTORS_FITTED.relative_to(ROOT)} and src/weft/techniques/cost_terms/fitted.toml written")


def write_report(path: Path) -> None:
    """Validate in all modes; write the page, the pictures and the figures that ship with Weft."""
    modes: tuple[tuple[str, str, Mode, bool, int], ...] = (
        ("datasheet", "Data sheets only", "datasheet", True, 0),
        ("fitted", "Constants of all other families", "fitted", True, 0),
        ("few-shot", "Constants of all other families, five rows of this one", "fitted", True, 5),
    )
    page = [_HEAD]
    for name, title, mode, cross_validate, few_shot in modes:
        validation = validate(path, mode, cross_validate=cross_validate, few_shot=few_shot)
        report = report_of(validation)
        _draw(validation, title, _PICTURES / f"planner-{name}.png")
        page += [f"\n## {title}\n", f"![predicted against measured](../pictures/planner-{name}.png)\n"]
        ends = next(place for place, line in enumerate(report.lines) if line.startswith("refused"))
        page += [_markdown(report.header, report.table), "", *map(_item, report.lines[: ends + 1])]
        if name == "fitted":
            (_PRICE / "accuracy.toml").write_text(dump_accuracy(accuracy_of(validation)))
        if name == "datasheet":
            refused = [line for line in report.lines[ends:] if line.startswith(" ")]
    page += ["\n## Rows without a prediction\n", *(f"- {line.strip()}" for line in refused)]
    _PAGE.write_text("\n".join(page) + "\n")
    print(f"{_PAGE.relative_to(ROOT)} written")


def _item(line: str) -> str:
    """A line of a list; what is indented belongs to the line above."""
    return f"  - {line.strip()}" if line.startswith(" ") else f"- {line}"


def _markdown(header: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---", *["--:"] * (len(header) - 1)], *table]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _draw(validation: Validation, title: str, path: Path) -> None:
    """Draw measured against predicted seconds, family by family, and the ratio below."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    timed = [outcome for outcome in validation.outcomes if outcome.is_timed]
    counts: dict[str, int] = {}
    for outcome in timed:
        counts[outcome.row.run.family] = counts.get(outcome.row.run.family, 0) + 1
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.5), layout="constrained", width_ratios=(1, 1.2))
    colours = pyplot.get_cmap("tab20").colors
    shown = sorted((name for name, count in counts.items() if count >= _LARGE), key=lambda name: -counts[name])
    for place, family in enumerate([*shown, "others"]):
        found = [
            (outcome.measured_seconds or 1.0, outcome.forecast.step_seconds or 1.0)
            for outcome in timed
            if (outcome.row.run.family if outcome.row.run.family in shown else "others") == family
        ]
        measured, predicted = [pair[0] for pair in found], [pair[1] for pair in found]
        style = {"s": 9 if len(found) > 100 else 22, "alpha": 0.45 if len(found) > 100 else 0.8}
        left.scatter(measured, predicted, color=colours[place % 20], linewidths=0, **style)
        ratios = [guess / truth for truth, guess in found]
        spread = [place + 0.7 * ((index * 0.618) % 1 - 0.5) for index in range(len(ratios))]
        right.scatter(ratios, spread, color=colours[place % 20], linewidths=0, **style)
    ends = [min(outcome.measured_seconds or 1.0 for outcome in timed), max(o.measured_seconds or 1.0 for o in timed)]
    left.plot(ends, ends, color="black", linewidth=0.8)
    left.fill_between(ends, [0.7 * end for end in ends], [1.3 * end for end in ends], color="black", alpha=0.07)
    left.set(xscale="log", yscale="log", xlabel="measured step, seconds", ylabel="predicted step, seconds")
    left.set_title(f"{title}: {len(timed):,} runs")
    right.axvline(1.0, color="black", linewidth=0.8)
    right.axvspan(0.7, 1.3, color="black", alpha=0.07, linewidth=0)
    right.set_yticks(range(len(shown) + 1), [f"{name} ({counts[name]})" for name in shown] + ["others"])
    right.invert_yaxis()
    right.set(xscale="log", xlabel="predicted over measured (grey: within 30 %)", xlim=(0.2, 4))
    right.set_xticks([0.25, 0.5, 0.7, 1.0, 1.3, 2.0, 4.0], ["¼", "½", "0.7", "1", "1.3", "2", "4"], minor=False)
    right.minorticks_off()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
