"""What was measured of the ways of collectives on a group's links, and which is chosen: as JSON, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from weft.comm.algorithms._choices import defines
from weft.comm.algorithms._method import Links
from weft.comm.algorithms._shortlist import MethodCandidate
from weft.config.cluster import Cluster, Collective
from weft.config.document import typed
from weft.errors import CollectiveError
from weft.files import cache_folder, write_whole

FORMAT = 1
"""Rises when a kept table means something else."""
CLEARLY = 0.95
"""What is chosen in place of the usual way takes less than so much of its time: half a dozen timings tell no less."""
_LARGEST_BYTES = 1 << 20
_MOST_TABLES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One collective at one size."""

    collective: Collective
    size_bytes: int
    """Size of the whole tensor on one rank."""
    choice: str
    candidates: tuple[MethodCandidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTable:
    """The choice for every collective and size on one group."""

    members: int
    nodes: tuple[int, ...]
    """Ranks of each node."""
    backend: str
    links: Links
    rows: tuple[TableRow, ...]

    def choose(self, collective: Collective, size_bytes: int) -> str | None:
        """Return the way chosen at the measured size nearest to this one by its logarithm; None: never measured."""
        rows = [row for row in self.rows if row.collective == collective]
        if not rows:
            return None
        return min(rows, key=lambda row: abs(math.log2(row.size_bytes) - math.log2(max(1, size_bytes)))).choice


def decide(candidates: Sequence[MethodCandidate], usual: str) -> str:
    """Return the name of the fastest that was measured, or what is `usual` where nothing is clearly faster."""
    measured = {
        candidate.name: candidate.measured_seconds for candidate in candidates if candidate.measured_seconds is not None
    }
    if not measured:
        raise CollectiveError("nothing was measured, so nothing can be chosen. Keep at least one candidate.")
    best = min(measured, key=lambda name: (measured[name], name))
    return usual if usual in measured and CLEARLY * measured[usual] <= measured[best] else best


def table_to_json(table: ChoiceTable) -> str:
    """Write a table; `table_from_json` gives an equal one back."""
    return json.dumps({"format": FORMAT, **asdict(table)})


def table_from_json(text: str) -> ChoiceTable:
    """Read a table.

    Raises:
        CollectiveError: it is damaged, or of another version, or chooses what cannot be done.
    """
    try:
        data = json.loads(text)
        kept = data.pop("format")
        if kept != FORMAT:
            raise CollectiveError(f"a table of choices has format {kept}, and this version reads {FORMAT}.")
        data.pop("circumstances", None)
        table = typed(ChoiceTable, data)
        if min(table.members, *table.nodes, *(row.size_bytes for row in table.rows)) < 1:
            raise ValueError("counts and sizes are positive")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CollectiveError(f"a table of choices is damaged: {type(error).__name__} {error}.") from None
    for row in table.rows:
        if row.collective not in ("all_reduce", "reduce_scatter", "all_gather"):
            raise CollectiveError(f"a table of choices says {row.collective}, which nobody chooses for.")
        if not defines(row.choice, row.collective):
            raise CollectiveError(f"a table of choices has {row.choice} do {row.collective}, which it does not.")
    return table


def table_path(members: int, nodes: Sequence[int], backend: str, *, folder: Path | None = None) -> Path:
    """Return where the table of such a group is kept: under a hash of it, this machine, and the versions of Weft and
    torch."""
    facts = {"members": members, "nodes": list(nodes), "backend": backend, **_circumstances()}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return _folder(folder) / f"{digest}.json"


def tables_of_others(members: int, nodes: Sequence[int], backend: str, *, folder: Path | None = None) -> str:
    """Return a sentence, after a space, about a table that was kept of such a group in other circumstances; empty where
    there is none."""
    now = _circumstances()
    for path in sorted(_folder(folder).glob("*.json"))[:_MOST_TABLES]:
        data = _read(path)
        if data is None or [data.get(name) for name in ("members", "nodes", "backend")] != [
            members, list(nodes), backend
        ]:  # fmt: skip
            continue
        then: Any = data.get("circumstances")
        if not isinstance(then, dict):
            continue
        changed = [f"{name} {then[name]}, now {now[name]}" for name in now if then.get(name, now[name]) != now[name]]
        if changed:
            return f" One was measured under {'; '.join(changed)}."
    return ""


def _circumstances() -> dict[str, object]:
    """What makes a table useless when it changes, beside the group."""
    return {
        "format": FORMAT,
        "machine": Cluster.detect().digest,
        "processor": _processor(),
        "weft": _version("weft"),
        "torch": _version("torch"),
    }


def _folder(folder: Path | None) -> Path:
    return folder or cache_folder("collectives")


def _read(path: Path) -> dict[str, Any] | None:
    """A kept file as JSON; None where it is none."""
    try:
        data: Any = json.loads(path.read_text()) if path.stat().st_size <= _LARGEST_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", data) if isinstance(data, dict) else None


def keep_table(table: ChoiceTable, *, folder: Path | None = None) -> Path:
    """Keep a table for `find_table`, and return the file, which is whole or not there at any moment.

    Raises:
        CollectiveError: the file cannot be written.
    """
    path = table_path(table.members, table.nodes, table.backend, folder=folder)
    content = json.dumps({**json.loads(table_to_json(table)), "circumstances": _circumstances()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise CollectiveError(f"{path} cannot be written: {error.strerror}. Make its folder writable.") from None
    return path


def find_table(members: int, nodes: Sequence[int], backend: str, *, folder: Path | None = None) -> ChoiceTable | None:
    """Return the table kept of such a group, or None.  A damaged file, or one of another group, counts as none."""
    path = table_path(members, nodes, backend, folder=folder)
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            return None
        table = table_from_json(path.read_text())
    except (OSError, UnicodeDecodeError, CollectiveError):
        return None
    same = (table.members, table.nodes, table.backend) == (members, tuple(nodes), backend)
    return table if same else None


def _processor() -> str:
    """The model of the processor as Linux names it; empty elsewhere, where the machine's cores tell it well enough."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # with its e-mail parser a tenth of what plans import

    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree
        return ""
