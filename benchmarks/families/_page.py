"""`docs/models.md`: the table of drawn families."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks._results import ROOT
from benchmarks.families._cells import PLANS

PAGE = ROOT / "docs" / "models.md"
TIMES = ROOT / "benchmarks" / "results" / "families-times.json"
_SIGNS = {
    "equal": "equal",
    "refused": "refused",
    "differs": "**differs**",
    "traceback": "**error**",
    "hang": "**hang**",
}


def write_page(result: Mapping[str, Any]) -> None:
    """Write the page of a result."""
    PAGE.write_text(
        "\n".join([*_head(result), *_table(result), "", *_times(), *_reasons(result), *_redrawn(result)]) + "\n"
    )


def _head(result: Mapping[str, Any]) -> list[str]:
    cells = [cell for family in result["families"].values() for cell in family["cells"].values()]
    counts = Counter(cell["outcome"] for cell in cells)
    said = ", ".join(f"{counts[name]} {name}" for name in _SIGNS if counts[name])
    known = result["versions"]
    commits = Counter(commit for family in result["families"].values() for commit in family.get("commits", []))
    return [
        "# Models that nobody chose",
        "",
        "A seed draws families of `transformers` of every kind, in a small form with random weights. A few modules of"
        " plain torch stand beside them.",
        "Each runs `weft check` under the plans below (mixtures also with shared experts), and then five steps of"
        " training. The losses must be those of one process.",
        "`make families` writes this page; every refusal in full is in"
        " [families.json](../benchmarks/results/families.json).",
        "",
        f"Seed {result['seed']}, {result.get('date', '')}, transformers {known['transformers']},"
        f" torch {known['torch']}.",
        f"Families by the commit that they ran on: {', '.join(f'{name} ({n})' for name, n in commits.most_common())}.",
        f"Of {len(cells)} cells: {said}.",
        "",
        "*equal*: the plan computes what one process computes. *refused*: a sentence below says why. Anything else is"
        " a defect.",
        "A cell is true of the commits above; those of `tensor 4, 2-D` are of 28 November 2026.",
        "",
    ]


def _table(result: Mapping[str, Any]) -> list[str]:
    lines = [f"| family | kind | way in | {' | '.join(PLANS)} |", "|---" * (3 + len(PLANS)) + "|"]
    for one in result["drawn"]:
        family = result["families"].get(one["name"])
        if family is None:
            continue
        cells = [_SIGNS[family["cells"][name]["outcome"]] if name in family["cells"] else "" for name in PLANS]
        lines.append(f"| {one['name']} | {one['kind']} | {family.get('way', '')} | {' | '.join(cells)} |")
    return lines


def _times() -> list[str]:
    """What `benchmarks/families/times.py` measured."""
    if not TIMES.exists():
        return []
    known = json.loads(TIMES.read_text())
    lines = [
        "## How long it takes",
        "",
        "Median seconds over the families, and quartiles:",
        "",
        "| command | seconds |",
    ]
    lines += ["|---|---|"]
    for goal in known["goals"]:
        low, high = goal["spread"]
        lines.append(
            f"| {goal['what'].removesuffix(', median over families')} | {goal['measured']:.1f}"
            f" ({low:.1f} to {high:.1f}) |"
        )
    ran = sum(one["all ran"] for one in known["samples"].values())
    return [
        *lines,
        "",
        f"Of {ran} of {len(known['samples'])} families on which all three come to a result; {known['date']},"
        f" {known['machine']['processor']}, {known['machine']['cores']} cores. `weft check` with an empty cache"
        " describes the model, plans and compares. Measured by `python -m benchmarks.families.times`"
        " ([families-times.json](../benchmarks/results/families-times.json)).",
        "",
    ]


def _reasons(result: Mapping[str, Any]) -> list[str]:
    """Every reason once, with the families and plans that it stands for."""
    lines = ["## Why not, and with what", ""]
    for one in result["drawn"]:
        family = result["families"].get(one["name"])
        if family is None:
            continue
        by_reason: dict[str, list[str]] = {}
        if family.get("why no folder"):
            by_reason[family["why no folder"]] = ["by folder"]
        for name, cell in family["cells"].items():
            if cell["why"]:
                by_reason.setdefault(_plain(cell["why"]), []).append(name)
        if by_reason:
            lines += [f"**{one['name']}**", ""]
            lines += [f"- {', '.join(names)}: {_plain(why)}" for why, names in by_reason.items()] + [""]
    return lines


def _redrawn(result: Mapping[str, Any]) -> list[str]:
    if not result["redrawn"]:
        return []
    lines = ["## Drawn, and drawn again", "", "Families whose small form the library did not make or run:", ""]
    return lines + [f"- {one['name']} ({one['kind']}): {_plain(one['why'])}" for one in result["redrawn"]]


def _plain(text: str) -> str:
    """The first sentences, as text of Markdown."""
    short = text if len(text) <= 240 else text[:240].rpartition(" ")[0] + " …"
    return short.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
