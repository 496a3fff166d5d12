"""Does the selector choose well?  On three link shapes its choices beside every way there is.

First ranks measure a table, as `weft comm explain` does, and end.  Then others race all ways of every cell (collective,
size, number of ranks) in turn, and what the table chooses is compared with the fastest.  The shapes: one fast host; two
hosts at 1 Gbit/s; two hosts at 1 Gbit/s one way and 200 Mbit/s the other.  The hosts are network namespaces with a rate
limit (root is needed; no latency is added, for these kernels have no netem).  Ranks find out themselves who shares a
host, and those who do share memory in hierarchical collectives.

The fastest of a dozen noisy medians is too fast by chance.  So one half of the rounds says which way is the best, and
the other half how much slower the choice is; then the halves change places, and the mean counts.

How well could anybody choose here?  One who had seen a third of the very race is judged by the other two thirds in the
same manner.  What he misses, the machine has changed its mind about between two rounds of one race.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks._contender import Entry, Host, contenders
from benchmarks._options import options_parser
from benchmarks._results import Goal, log, machine, versions, write_result
from benchmarks._slow_link import NoNamespacesError, slow_link
from benchmarks._statistics import best_of, round_ratios, spread
from weft.comm.algorithms import ChoiceTable, format_size, table_from_json
from weft.config.cluster import Collective

SIZES = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20)
"""Bytes of the cells."""
TABLE_SIZES = tuple(1 << power for power in range(10, 23, 2))
"""Those that are measured for the table: two of the cells lie between them."""
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
WITHIN = 1.10
_HIERARCHIES = ("hierarchical", "hierarchical+recursive_doubling")


@dataclass(frozen=True, slots=True)
class Shape:
    """Links between hosts, and on how many ranks of each host collectives run."""

    title: str
    worlds: tuple[tuple[int, ...], ...]
    """Ranks of each host."""
    rates: tuple[str, str] | None
    """Of the link, there and back; None: all ranks are on this host."""


SHAPES: Mapping[str, Shape] = {
    "host": Shape("one host", ((2,), (3,), (4,)), None),
    "slow": Shape("2 hosts, 1 Gbit/s", ((1, 1), (2, 1), (2, 2)), ("1gbit", "1gbit")),
    "asymmetric": Shape("2 hosts, 1 Gbit/s and 200 Mbit/s", ((1, 1), (2, 1), (2, 2)), ("1gbit", "200mbit")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One collective at one size on one world."""

    shape: str
    ranks: tuple[int, ...]
    collective: Collective
    size_bytes: int
    choice: str
    best: str
    """By its median over all rounds."""
    ratio: float
    """Of the choice's seconds to the best's, each half of the rounds judged by the other's best."""
    plain_ratio: float
    """Of the medians over all rounds: noise counts against the choice."""
    informed_ratio: float
    """As `ratio`, of the best in one third of the race, judged by the other two."""


@contextmanager
def _hosts(shape: Shape) -> Generator[tuple[Host, Host] | None]:
    if shape.rates is None:
        yield None
        return
    with slow_link(shape.rates[0], back=shape.rates[1]) as hosts:
        yield hosts


def run_ranks(target: str, settings: Mapping[str, Any], ranks: Sequence[int], hosts: tuple[Host, Host] | None) -> Any:
    """Let fresh processes take one step of a contender, and return what it has written, as JSON."""
    places = (
        () if hosts is None else tuple(host for host, count in zip(hosts, ranks, strict=True) for _ in range(count))
    )
    with tempfile.TemporaryDirectory(prefix="weft-selector-") as folder:
        output = Path(folder) / "found.json"
        entry = Entry(
            name=f"{target} {'+'.join(map(str, ranks))}",
            target=f"benchmarks._selector:{target}",
            settings={**settings, "output": str(output)},
            ranks=sum(ranks),
            hosts=places,
        )
        with contenders([entry], warmup_steps=1) as alive:
            if not alive:
                raise SystemExit(f"{entry.name} ended early: nothing was measured")
        return json.loads(output.read_text())


def measure_shape(name: str, collectives: Sequence[str], seconds: float, worlds: int) -> tuple[list[Cell], Any]:
    """Cells of a shape, and all samples behind them."""
    shape, cells = SHAPES[name], list[Cell]()
    samples: dict[str, Any] = {}
    with _hosts(shape) as hosts:
        for ranks in shape.worlds[-worlds:]:
            settings: dict[str, Any] = {"collectives": list(collectives), "sizes": list(TABLE_SIZES)}
            table = table_from_json(json.dumps(run_ranks("table_rank", settings, ranks, hosts)))
            assert table.nodes == ranks, f"ranks found hosts of {table.nodes} ranks, and there are {ranks}"
            chosen = sorted({row.choice for row in table.rows})
            settings |= {"sizes": list(SIZES), "seconds": seconds, "chosen": chosen}
            race = run_ranks("race_rank", settings, ranks, hosts)
            found = [
                judge(name, table, collective, int(size), cell)
                for collective, sizes in race["cells"].items()
                for size, cell in sizes.items()
            ]
            cells += found
            good = sum(cell.ratio <= WITHIN for cell in found)
            log(f"{shape.title}, {'+'.join(map(str, ranks))} ranks: {good} of {len(found)} cells within 10 %")
            samples["+".join(map(str, ranks))] = {"links": asdict(table.links), "race": race["cells"]}
    return cells, samples


def judge(shape: str, table: ChoiceTable, collective: Collective, size: int, cell: Mapping[str, Any]) -> Cell:
    """Compare a table's choice with the best of a race."""
    choice = table.choose(collective, size)
    assert choice is not None, "the table has every collective"
    seconds = cast("dict[str, list[float]]", cell["seconds"])
    names = list(seconds)
    best = best_of(seconds, names)
    seen, *judges = _parts(seconds, 3)
    return Cell(
        shape=shape, ranks=table.nodes, collective=collective, size_bytes=size, choice=choice, best=best,
        ratio=_slower(choice, *_parts(seconds, 2)), plain_ratio=median(seconds[choice]) / median(seconds[best]),
        informed_ratio=_slower(best_of(seen, names), *judges),
    )  # fmt: skip


def _parts(seconds: Mapping[str, Sequence[float]], count: int) -> list[dict[str, Sequence[float]]]:
    """Every way's rounds dealt out in turn."""
    return [{way: found[part::count] for way, found in seconds.items()} for part in range(count)]


def _slower(choice: str, one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]]) -> float:
    """How much longer the choice takes than the best: either half of the rounds is judged by the other's best."""
    halves = [
        median(judged[choice]) / median(judged[best_of(picked, list(picked))])
        for picked, judged in ((one, other), (other, one))
    ]
    return sum(halves) / 2


def goals_of(cells: Sequence[Cell]) -> list[Goal]:
    """The share of cells in which the choice is nearly the best: of all, and of each shape."""
    goals = [_share("over all shapes", cells)] if len({cell.shape for cell in cells}) > 1 else []
    for name, shape in SHAPES.items():
        mine = [cell for cell in cells if cell.shape == name]
        goals += [_share(shape.title, mine)] if mine else []
    return goals


def _share(where: str, cells: Sequence[Cell]) -> Goal:
    share, plain, informed = (
        100 * sum(ratio <= WITHIN for ratio in ratios) / len(cells)
        for ratios in zip(*((cell.ratio, cell.plain_ratio, cell.informed_ratio) for cell in cells), strict=True)
    )
    what = (
        f"cells within 10 % of the best, {where} ({len(cells)} cells; {plain:.0f} % by plain medians;"
        f" {informed:.0f} % for who has seen a third of the race)"
    )
    return Goal(what=what, measured=share, goal=90, better="higher", unit=" %")


def hierarchy_goals(samples: Mapping[str, Any]) -> list[Goal]:
    """How much faster the better hierarchical way is than a flat ring, on two hosts with two ranks each."""
    goals: list[Goal] = []
    for size, cell in samples["2+2"]["race"]["all_reduce"].items():
        if int(size) < 64 << 10:
            continue
        seconds = cell["seconds"]
        mine = best_of(seconds, _HIERARCHIES)
        ratios = round_ratios(seconds["ring"], seconds[mine])
        what = f"{mine} over a flat ring at 1 Gbit/s, all-reduce of {format_size(int(size))}, 2+2 ranks"
        goals.append(
            Goal(what=what, measured=median(ratios), goal=1.5, better="higher", unit="x", spread=spread(ratios))
        )
    return goals


def main() -> None:
    parser = options_parser(__doc__, rounds=None)
    parser.add_argument("--shape", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), help="which to run")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    parser.add_argument("--seconds", type=float, default=1.5, help="for the race of one cell")
    parser.add_argument("--worlds", type=int, default=3, help="of a shape, the largest first")
    options = parser.parse_args()
    before, cells, goals = machine(), list[Cell](), list[Goal]()
    samples: dict[str, Any] = {}
    for name in options.shape:
        try:
            found, samples[name] = measure_shape(name, options.collectives, options.seconds, options.worlds)
        except NoNamespacesError as problem:
            log(f"left out: {SHAPES[name].title} ({problem})")
            continue
        cells += found
        if name == "slow" and "all_reduce" in options.collectives:
            goals += hierarchy_goals(samples[name])
    if not cells:
        raise SystemExit("nothing was measured")
    about = {
        "machine": before,
        "versions": versions(),
        "settings": {"seconds": options.seconds, "sizes": SIZES, "table_sizes": TABLE_SIZES},
        "note": options.note,
    }
    samples["cells"] = [asdict(cell) for cell in cells]
    write_result("selector", goals=[*goals_of(cells), *goals], samples=samples, about=about, folder=options.folder)


if __name__ == "__main__":
    main()
