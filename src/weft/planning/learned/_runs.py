"""Recorded runs of a machine, as they are kept: what was priced for each, beside what it took."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.config.cluster import Cluster
from weft.config.document import Rules, bind, dump, read_document
from weft.errors import DataError
from weft.files import cache_folder, write_whole

_RULES = Rules(DataError)

MOST_RUNS = 64
"""Runs that are kept of one machine: the newest."""
MOST_DESCHEDULED = 0.35
"""Share of time in which a rank was ready to run and had no processor, above which a run says nothing of the machine:
other work took it."""
_MOST_SECONDS = 3_600.0
_FORMAT = 1
_HEADER = (
    "Recorded runs of this machine, from which `weft plan` corrects its predictions.  Written by weft train.",
    "Remove the file, or a run of it, to forget; `weft plan --no-learned` predicts without it.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedTerms:
    """One step as prices have it without corrections, in seconds of the slowest rank unless it says otherwise."""

    products: float
    """Matrix products and attention."""
    convolutions: float
    plain: float
    """Operators that only move data."""
    operators: float
    """Passes of operators, a number."""
    copies: float
    """ZeRO-3's copies between weights and what travels, where nothing hides them."""
    communication: float
    """Exposed collectives and messages, without these copies."""
    collectives: float
    """Collectives that are exposed, a number."""
    bubble: float
    optimizer: float
    other: float

    @property
    def computing(self) -> float:
        """Seconds of forward and backward.  Copies are recorded there: a rank makes them while it computes."""
        return self.products + self.convolutions + self.plain + self.copies

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.computing + self.communication + self.bubble + self.optimizer + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTerms:
    """One step as it was recorded, in seconds: medians of steady steps, without time that other work took."""

    computing: float
    communication: float
    bubble: float
    optimizer: float
    other: float
    step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One run that ended well: what was priced for its plan, and what was measured."""

    ended: int
    """Seconds since 1970."""
    torch: str
    formulas: str
    """Digest of the code that priced it: prices of other code are no basis of a correction."""
    model: str
    plan: str
    precision: str
    cores: float
    """Cores of a rank."""
    steps: int
    """Steps that the medians are over."""
    descheduled: float
    """Share of their time in which ranks were ready to run and had no processor, 0 to 1."""
    priced: PricedTerms
    measured: MeasuredTerms

    @property
    def problem(self) -> str:
        """What makes the run unbelievable; empty where nothing does."""
        for part in (self.priced, self.measured):
            for field in fields(part):
                value = float(getattr(part, field.name))
                if not (abs(value) <= _MOST_SECONDS or field.name in ("operators", "collectives")):
                    return f"{field.name} = {value:g}"
        if min(self.measured.step, self.measured.computing, self.priced.computing, self.cores) <= 0:
            return "a time that is not above 0"
        if not 0 <= self.descheduled <= 1:
            return f"descheduled = {self.descheduled:g}"
        if not 0 < self.ended <= time.time() + 86_400:
            return f"ended = {self.ended}, which is no time before today"
        ratio = self.measured.step / max(self.priced.step, 1e-9)
        return f"a step of {ratio:.3g} times its price" if not 0.02 <= ratio <= 50 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunsFile:
    """The file of a machine."""

    format: int = _FORMAT
    runs: tuple[RecordedRun, ...] = ()

    def __post_init__(self) -> None:
        _RULES.types(self)


def runs_path(cluster: Cluster, folder: Path | None = None) -> Path:
    """Return the file of a machine; what `weft probe` measured is part of its name, because corrections of one price
    are none of another."""
    return (folder or cache_folder("learned")) / f"{cluster.digest}.toml"


def kept_runs(cluster: Cluster, folder: Path | None = None) -> tuple[list[RecordedRun], str]:
    """Return the runs that are kept of a machine, oldest first, and what is wrong with their file; empty: nothing."""
    path = runs_path(cluster, folder)
    if not path.is_file():
        return [], ""
    try:
        file = bind(_RunsFile, read_document(str(path), "learned", DataError))
    except DataError as error:
        return [], f"{path} is not used: {str(error).splitlines()[0]}"
    if file.format != _FORMAT:
        return [], f"{path} is not used: it is of another version of Weft"
    good = [run for run in file.runs if not run.problem]
    bad = [run.problem for run in file.runs if run.problem]
    note = f"{path}: {len(bad)} of its runs are not used, for they cannot be true ({bad[0]})" if bad else ""
    return sorted(good, key=lambda run: run.ended), note


def keep_run(run: RecordedRun, cluster: Cluster, folder: Path | None = None) -> Path:
    """Add a run to those of a machine, and return the file.  Of more than `MOST_RUNS` the oldest go.

    Raises:
        OSError: the file cannot be written.
    """
    runs = [*kept_runs(cluster, folder)[0], run][-MOST_RUNS:]
    path = runs_path(cluster, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, dump(_RunsFile(runs=tuple(runs)), header=_HEADER, everything=True, descriptions=False))
    return path


def usable(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the runs whose prices and measurements are those of this environment."""
    here = torch_version()
    return [run for run in runs if run.formulas == formulas_digest() and _minor(run.torch) == _minor(here)]


def torch_version() -> str:
    """Return the version of torch that is installed, without importing it; empty where there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def _minor(release: str) -> str:
    return ".".join(release.partition("+")[0].split(".")[:2])


@cache
def formulas_digest() -> str:
    """Return eight digits that name the code of prices."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    files = [*(root / "planning" / "price").glob("*.py"), *(root / "techniques" / "cost_terms").glob("*.*")]
    for path in sorted([*files, *(root / "techniques").glob("*/cost.py")]):
        if path.suffix in (".py", ".toml"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
