"""The table and the plots of whatever results lie in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, cast

Result = Mapping[str, Any]


def write_report(folder: Path) -> None:
    """Write `README.md` and one PNG per benchmark that has something to show."""
    found: dict[str, Result] = {}
    others: list[str] = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and "goals" in content:
            found[path.stem] = cast(Result, content)
        else:
            others.append(path.name)
    lines = ["# Results", "", "Written by `make bench`; raw samples lie beside this page. What each benchmark does and"]
    lines += ["what was learned is in `docs/notebook/benchmarks.md`.", ""]
    for name, result in found.items():
        lines += _section(name, result)
        plot = _PLOTS.get(name)
        if plot is not None:
            plot(result, folder / f"{name}.png")
            lines += [f"![{name}]({name}.png)", ""]
    if others:
        links = ", ".join(f"[{name}]({name})" for name in others)
        lines += ["## Kept by tools of their own", "", f"{links}: see `docs/notebook/benchmarks.md`.", ""]
    (folder / "README.md").write_text("\n".join(lines))


def _section(name: str, result: Result) -> list[str]:
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"## {name}",
        "",
        f"{result['date']}, {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB,"
        f" load before {machine['load_before']}, torch {versions['torch']}, commit {versions['weft_commit']}."
        + (f" {result['note']}" if result.get("note") else ""),
        "",
    ]
    if result["goals"]:
        lines += ["| what | measured | quartiles | goal | |", "|---|---|---|---|---|"]
        lines += [_row(goal) for goal in result["goals"]] + [""]
    if name == "peers":
        lines += [*_peers_table(result["samples"]), ""]
    if name == "bubble":
        lines += [*_bubble_table(result["samples"]), ""]
    if name == "memory":
        lines += [*_memory_table(result["samples"]), ""]
    return lines


def _row(goal: Mapping[str, Any]) -> str:
    sign = "≥" if goal["better"] == "higher" else "≤"
    spread = "" if goal["spread"] is None else f"{goal['spread'][0]:.3g} to {goal['spread'][1]:.3g}"
    verdict = "reached" if goal["reached"] else "**missed**"
    unit = goal["unit"]
    return f"| {goal['what']} | {goal['measured']:.3g}{unit} | {spread} | {sign} {goal['goal']:g}{unit} | {verdict} |"


def _peers_table(samples: Mapping[str, Any]) -> list[str]:
    heads = ("who", "tokens/s", "in the best round", "processor s per step", "peak MiB per rank")
    heads += ("Weft is faster by", "in processor time")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, found in sorted(samples.items(), key=lambda item: -item[1]["tokens_per_second"]):
        seconds, speed = found["seconds"], found["tokens_per_second"]
        cells = [name, f"{speed:.0f}", f"{speed * median(seconds) / min(seconds):.0f}"]
        cells += [
            f"{median(found['cpu_seconds']):.2f}" if "cpu_seconds" in found else "",
            str(found.get("peak_mib", "")),
        ]
        cells += [_ratios(found.get("ratios", {})), _ratios(found.get("cpu_ratios", {}))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ratios(ratios: Mapping[str, Any]) -> str:
    return ", ".join(f"{median(found):.2f}x ({kind})" for kind, found in ratios.items())


def _bubble_table(samples: Mapping[str, Any]) -> list[str]:
    lines = ["| schedule | bubble s | formula s | simulated s | share of the step |", "|---|---|---|---|---|"]
    for name, found in samples.items():
        wanted = found["expected_seconds"]
        lines.append(
            f"| {name} | {median(found['bubble_seconds']):.3f} | {wanted['formula']:.3f} | {wanted['simulated']:.3f}"
            f" | {found['bubble_share']:.1%} |"
        )
    return lines


def _memory_table(samples: Mapping[str, Any]) -> list[str]:
    lines = ["| plan | bytes per parameter | formula |", "|---|---|---|"]
    for name, found in samples.items():
        if name != "parameters":
            wanted = found["formula_bytes"] / samples["parameters"]
            lines.append(f"| {name} ranks | {found['per_parameter']:.3f} | {wanted:.3f} |")
    return lines


# ── plots ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

_OWN, _OTHERS, _MARK = "#c0392b", "#7f8c8d", "#2c3e50"


def _axes(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_peers(result: Result, path: Path) -> None:
    ordered = sorted(result["samples"].items(), key=lambda item: item[1]["tokens_per_second"])
    figure, axes = _axes(8, 0.3 * len(ordered) + 1)
    names = [name for name, _ in ordered]
    speeds = [found["tokens_per_second"] for _, found in ordered]
    axes.barh(names, speeds, color=[_OWN if name.startswith("weft") else _OTHERS for name in names])
    axes.set_xlabel("tokens per second, 2 ranks of one thread (medians)")
    _save(figure, path)


def _plot_bubble(result: Result, path: Path) -> None:
    samples = result["samples"]
    figure, axes = _axes(8, 0.35 * len(samples) + 1)
    names = list(samples)[::-1]
    axes.barh(names, [median(samples[name]["bubble_seconds"]) for name in names], color=_OTHERS, label="measured")
    formulas = [samples[name]["expected_seconds"]["formula"] for name in names]
    axes.plot(formulas, names, "|", color=_OWN, markersize=14, markeredgewidth=2, label="formula")
    axes.set_xlabel("bubble of a step (s)")
    axes.legend()
    _save(figure, path)


def _plot_memory(result: Result, path: Path) -> None:
    samples = {name: found for name, found in result["samples"].items() if name != "parameters"}
    figure, axes = _axes(8, 0.26 * len(samples) + 1)
    names = list(samples)[::-1]
    axes.barh(names, [samples[name]["per_parameter"] for name in names], color=_OTHERS, label="measured")
    formulas = [samples[name]["formula_bytes"] / result["samples"]["parameters"] for name in names]
    axes.plot(formulas, names, "|", color=_OWN, markersize=10, markeredgewidth=2, label="formula")
    axes.set_xlabel("bytes of model state per parameter and rank")
    axes.legend(loc="lower right")
    _save(figure, path)


def _plot_techniques(result: Result, path: Path) -> None:
    sweep = result["samples"].get("buckets", {}).get("seconds_by_bucket_mib", {})
    if not sweep:
        return
    figure, axes = _axes(6, 3.5)
    sizes = [int(size) for size in sweep]
    middles = [median(found) for found in sweep.values()]
    below = [middle - min(found) for middle, found in zip(middles, sweep.values(), strict=True)]
    above = [max(found) - middle for middle, found in zip(middles, sweep.values(), strict=True)]
    axes.errorbar(sizes, middles, yerr=[below, above], color=_MARK, marker="o", capsize=3)
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bucket size (MiB); 115 MB of gradients, 2 ranks")
    axes.set_ylabel("seconds per step (median, range)")
    _save(figure, path)


def _plot_communication(result: Result, path: Path) -> None:
    """Size against bus bandwidth: a row of collectives per number of ranks."""
    rows = {name: found["seconds"] for name, found in result["samples"].items() if "manner" in found}
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {
        "all_reduce": "all-reduce",
        "reduce_scatter": "reduce-scatter",
        "all_gather": "all-gather",
        "message": "message to and fro",
    }
    columns = max(map(len, rows.values()))
    figure, grid = plt.subplots(
        len(rows), columns, figsize=(4.3 * columns, 3.6 * len(rows)), layout="constrained", sharex=True, squeeze=False
    )
    for row, (name, collectives) in zip(grid, rows.items(), strict=True):
        ranks = int(name.split()[0])
        limit = collectives["all_reduce"]
        for axes, (collective, ways) in zip(row, collectives.items(), strict=True):
            share = 2 if collective == "message" else (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks
            for way, style in _WAYS.items():
                if way in ways:
                    sizes = [int(size) for size in ways[way]]
                    speeds = [size * share / median(ways[way][str(size)]) / 1e9 for size in sizes]
                    axes.plot(sizes, speeds, style, markersize=4, label=way)
            sizes = [int(size) for size in limit["memcpy of libc"]]
            copies = [min(median(limit[f"memcpy of {who}"][str(size)]) for who in ("libc", "torch")) for size in sizes]
            speeds = [size / seconds / 1e9 for size, seconds in zip(sizes, copies, strict=True)]
            axes.plot(sizes, speeds, ":", color=_MARK, label="memcpy")
            _size_axis(axes, sizes)
            axes.set_yscale("log")
            axes.set_title(f"{titles[collective]}, {ranks} ranks")
        row[0].set_ylabel("bus bandwidth (GB/s)")
    grid[0][0].legend(fontsize=8)
    _save(figure, path)


def _plot_auto(result: Result, path: Path) -> None:
    """Each cell's predicted step against the measured one, and how much longer the chosen plan took than the best."""
    cells, cores = result["samples"]["cells"], result["machine"]["cores"]
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    groups = {
        "as many processes as cores, or fewer": ([cell for cell in cells if cell["world"] <= cores], _OWN, "o"),
        "more processes than cores": ([cell for cell in cells if cell["world"] > cores], _OTHERS, "s"),
    }
    for label, (mine, color, marker) in groups.items():
        predicted = [cell["predicted_seconds"] * 1e3 for cell in mine]
        left.plot([cell["measured_seconds"] * 1e3 for cell in mine], predicted, marker, color=color, label=label)
        regrets = sorted(100 * max(cell["tried_regret"], 0) for cell in mine)
        shares = [100 * (at + 1) / len(regrets) for at in range(len(regrets))]
        right.step(regrets, shares, where="post", color=color, label=f"{label}, with trials")
        regrets = sorted(100 * max(cell["regret"], 0) for cell in mine)
        right.step(regrets, shares, ":", where="post", color=color, label=f"{label}, by prediction")
    ends = [
        min(cell["measured_seconds"] for cell in cells) * 500,
        max(cell["measured_seconds"] for cell in cells) * 2e3,
    ]
    left.plot(ends, ends, "-", color=_MARK, linewidth=1)
    left.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color=_MARK, alpha=0.15)
    left.set(xscale="log", yscale="log", xlabel="measured step (ms)", ylabel="predicted step (ms); band: 10 %")
    left.legend(fontsize=8)
    right.axvline(5, color=_MARK, linewidth=1)
    right.set(xlabel="chosen plan's step over the best one's (% longer)", ylabel="share of cells (%)", ylim=(0, 102))
    right.legend(fontsize=8, loc="lower right")
    _save(figure, path)


def _plot_selector(result: Result, path: Path) -> None:
    """Seconds of every way over the fastest way's, by size, and what was chosen: all-reduces of each shape's largest
    world."""
    samples = {name: found for name, found in result["samples"].items() if name != "cells"}
    cells = [cell for cell in result["samples"]["cells"] if cell["collective"] == "all_reduce"]
    if not cells:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(
        1, len(samples), figsize=(4.8 * len(samples), 4.4), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (shape, worlds) in zip(grid[0], samples.items(), strict=True):
        largest = max((cell["ranks"] for cell in cells if cell["shape"] == shape), key=sum)
        race = worlds["+".join(map(str, largest))]["race"]["all_reduce"]
        best = {size: min(median(found) for found in cell["seconds"].values()) for size, cell in race.items()}
        for way in sorted({way for cell in race.values() for way in cell["seconds"]}):
            sizes = [size for size, cell in race.items() if way in cell["seconds"]]
            times = [median(race[size]["seconds"][way]) / best[size] for size in sizes]
            style = _RACED.get(way, {"color": "#d0d0d0"})
            axes.plot([int(size) for size in sizes], times, markersize=4, **style)
        chosen = [(c["size_bytes"], c["plain_ratio"]) for c in cells if (c["shape"], c["ranks"]) == (shape, largest)]
        axes.plot(*zip(*chosen, strict=True), "o", color=_OWN, markersize=13, fillstyle="none", label="chosen")
        axes.axhspan(1, 1.1, color=_OTHERS, alpha=0.2)
        _size_axis(axes, [int(size) for size in race])
        axes.set_yscale("log")
        axes.set_ylim(0.97, 4)
        axes.set_yticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"], minor=False)
        axes.set_yticks([], minor=True)
        axes.set_title(f"{shape}, {'+'.join(map(str, largest))} ranks")
    grid[0][0].set_ylabel("seconds over the fastest way's (all-reduce)")
    grid[0][-1].legend(fontsize=8)
    _save(figure, path)


def _size_axis(axes: Any, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size >> 20}M" if size >> 20 else f"{size >> 10}K" for size in sizes])


_RACED: Mapping[str, Mapping[str, Any]] = {
    "backend": {"color": "k", "marker": "^", "label": "backend (Gloo)"},
    "ring": {"color": "#2980b9", "marker": "s", "label": "ring"},
    "recursive_doubling": {"color": "#27ae60", "marker": "v", "label": "recursive doubling"},
    "direct": {"color": "#8e44ad", "marker": "D", "label": "direct"},
    "hierarchical": {"color": _OWN, "marker": "o", "label": "hierarchical"},
    "hierarchical+recursive_doubling": {
        "color": _OWN,
        "marker": "o",
        "linestyle": "--",
        "label": "… +recursive doubling",
    },
}


_WAYS: Mapping[str, str] = {
    "weft, tensor in shared memory": "r-o",
    "weft": "r--s",
    "engine": "m-.",
    "gloo": "k-^",
}
_PLOTS: Mapping[str, Callable[[Result, Path], None]] = {
    "peers": _plot_peers,
    "bubble": _plot_bubble,
    "memory": _plot_memory,
    "techniques": _plot_techniques,
    "communication": _plot_communication,
    "selector": _plot_selector,
    "auto": _plot_auto,
}
