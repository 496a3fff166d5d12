"""From a row to what pricing needs, and from pricing to what the row could have shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.published._devices import cluster_of
from benchmarks.published._framework_memory import MEMORY_OF_FRAMEWORKS
from benchmarks.published._knowledge import Knowledge
from benchmarks.published._layouts import layouts_of_run, world_of
from benchmarks.published._models import profile_of_run
from benchmarks.published._rows import Run
from benchmarks.published._sources import FrameworkHistory, attention_speed, history_of, year_of
from benchmarks.published._unpredictable import Unpredictable
from weft.config.cluster import Cluster
from weft.errors import WeftError
from weft.model.profile import Profile
from weft.planning.price import CostModel, Prediction
from weft.techniques.cost_terms import Framework, Layout

_GIBI = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row, ready to be priced under any calibration."""

    run: Run
    profile: Profile
    cluster: Cluster
    layouts: tuple[Layout, ...]
    """More than one where the row leaves a choice open."""
    history: FrameworkHistory
    framework: Framework

    @property
    def is_single_layer(self) -> bool:
        """Whether the source times one layer alone: no optimizer, no embedding."""
        return self.run.layers == 1 and self.run.vocabulary is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is predicted for one row."""

    index: int
    step_seconds: float | None = None
    peak_gibibytes: float | None = None
    """Peak of the kind that the source publishes: allocated, reserved or in use on the device."""
    fits: bool | None = None
    refused: str | None = None


def case_of(run: Run, alike: Case | None = None) -> Case:
    """Return what pricing needs of a row; model and cluster may be taken from a row that is alike in them.

    Raises:
        Unpredictable: the row does not say enough.
    """
    profile = alike.profile if alike else profile_of_run(run)
    cluster = alike.cluster if alike else cluster_of(run, world_of(run))
    history = history_of(run)
    return Case(
        run=run,
        profile=profile,
        cluster=cluster,
        layouts=layouts_of_run(run, profile, cluster),
        history=history,
        framework=_framework_of_run(run, history, cluster.kinds[0], has_experts=profile.num_experts > 0),
    )


def _framework_of_run(run: Run, history: FrameworkHistory, kind: str, *, has_experts: bool) -> Framework:
    """What its framework did in its year, but for what the row itself says."""
    framework = framework_of(history, year_of(run), kind, has_experts=has_experts)
    if run.attention is None:
        return framework
    if run.attention not in ("fused", "unfused"):
        raise Unpredictable(f'attention = "{run.attention}" is neither fused nor unfused')
    is_fused = run.attention == "fused"
    return replace(framework, flash_attention=is_fused, counts_causal_half=is_fused)


def framework_of(history: FrameworkHistory, year: int, kind: str, *, has_experts: bool) -> Framework:
    """Return what the framework's code did in a year on a kind of device; its scalar is not set."""
    has_flash = year >= history.flash_since
    overlaps = history.fully_sharded or year >= history.overlaps_gradients_since
    return Framework(
        name=f"{history.name} {year}",
        year=year,
        flash_attention=has_flash,
        attention_speed=attention_speed(history, year, kind),
        fused_elementwise=year >= history.fuses_since,
        overlap_gradients=overlaps,
        overlap_parameters=overlaps,
        overlap_tensor=year >= history.overlaps_tensor_since,
        overlap_tensor_backward=year >= history.overlaps_backward_since,
        bucket_elements=history.bucket_elements,
        bucket_elements_per_rank=history.bucket_elements_per_rank,
        sends_tokens_once=year >= history.sends_tokens_once_since,
        counts_causal_half=has_flash,
        overlap_expert=history.overlaps_experts,
        balances_experts=history.balances_experts,
        eager=year < max(history.lean_since, history.lean_mixtures_since if has_experts else 0),
        memory=MEMORY_OF_FRAMEWORKS.get(history.name) or MEMORY_OF_FRAMEWORKS[history.memory_model],
    )


def cases_of(runs: Sequence[Run]) -> tuple[Case | Forecast, ...]:
    """Return a case per row, or a refusal with its reason.  Rows alike in model and cluster share these."""
    made: dict[Run, Case] = {}
    cases: list[Case | Forecast] = []
    for run in runs:
        try:
            common = _model_and_cluster(run)
            case = case_of(run, made.get(common))
        except (Unpredictable, WeftError) as error:
            cases.append(Forecast(index=run.index, refused=str(error)))
            continue
        made.setdefault(common, case)
        cases.append(case)
    return tuple(cases)


def _model_and_cluster(run: Run) -> Run:
    """The row without what neither its model nor its cluster depends on."""
    return replace(
        run,
        index=0,
        source=str(year_of(run)),
        data=None,
        tensor=None,
        sequence_parallel=None,
        pipeline=None,
        chunks=None,
        context=None,
        expert=None,
        zero=None,
        microbatch=None,
        global_batch=None,
        recompute=None,
        precision=None,
        schedule=None,
        attention=None,
        devices=world_of(run) if run.devices is None else run.devices,
    )


class Forecaster:
    """Predicts cases with one state of knowledge; keeps what cases of one model on one cluster share."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self._cost_models: dict[tuple[int, int, Framework], CostModel] = {}
        self._kept: list[Case] = []

    def forecast(self, case: Case | Forecast) -> Forecast:
        """Predict one row; a refused one stays refused."""
        if isinstance(case, Forecast):
            return case
        try:
            case = self.settled(case)
            found = self.price(case, case.layouts[0])
        except WeftError as error:
            return Forecast(index=case.run.index, refused=str(error))
        memory = _memory(case, found)
        return Forecast(
            index=case.run.index,
            step_seconds=_seconds(case, found),
            peak_gibibytes=None if memory is None else memory / _GIBI,
            fits=found.fits if found.stages else None,
        )

    def settled_or_refused(self, case: Case | Forecast) -> Case | Forecast:
        """Return the case with one layout, or a refusal where no layout can be priced."""
        if isinstance(case, Forecast):
            return case
        try:
            settled = self.settled(case)
            self.price(settled, settled.layouts[0])
        except WeftError as error:
            return Forecast(index=case.run.index, refused=str(error))
        return settled

    def settled(self, case: Case) -> Case:
        """Return the case with the one layout that its authors would have chosen: the fastest that fits.

        Where none fits, it is the one that lacks least memory.
        """
        if len(case.layouts) == 1:
            return case
        priced = [(layout, self.price(case, layout)) for layout in case.layouts]
        fitting = [(layout, found) for layout, found in priced if not found.stages or found.fits]
        if fitting:
            best = min(fitting, key=lambda pair: pair[1].step_seconds)
        else:
            best = min(priced, key=lambda pair: pair[1].fullest.device)
        return replace(case, layouts=(best[0],))

    def seconds(self, case: Case) -> float:
        """Return the step of a settled case, without its memory.  The layout must fit (`check_layout`)."""
        time = self._cost_model(case).time(case.layouts[0])
        return time.total - (time.optimizer + time.other if case.is_single_layer else 0.0)

    def price(self, case: Case, layout: Layout) -> Prediction:
        """Price one layout of a case."""
        return self._cost_model(case).predict(layout)

    def _cost_model(self, case: Case) -> CostModel:
        key = (id(case.profile), id(case.cluster), case.framework)
        if key not in self._cost_models:
            scalar = self.knowledge.scalar(case.framework.name)
            framework = replace(case.framework, slowdown=scalar.slowdown, spread=scalar.spread)
            self._cost_models[key] = CostModel(case.profile, case.cluster, framework, self.knowledge.calibration)
            self._kept.append(case)  # so that no other object takes over their identities
        return self._cost_models[key]


def is_fullest(case: Case) -> bool:
    """Whether the published peak is the fullest rank's; Megatron's tests log their last rank only."""
    return not (case.history.reports_first or "golden_values" in case.run.source)


def _seconds(case: Case, found: Prediction) -> float:
    if case.is_single_layer:
        return found.step_seconds - found.time.optimizer - found.time.other
    return found.step_seconds


def _memory(case: Case, found: Prediction) -> float | None:
    """Bytes of the figure that the source publishes, of the fullest rank where it is not known
    which rank it is."""
    if not found.stages:
        return None
    stage = found.fullest
    if not is_fullest(case):
        stage = found.stages[0] if case.history.reports_first else found.stages[-1]
    match case.history.memory:
        case "allocated":
            return stage.kinds.allocated
        case "reserved":
            return stage.reserved
        case "device":
            return stage.device
