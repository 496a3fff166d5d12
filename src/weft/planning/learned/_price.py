"""The price of a step by what corrections apply to."""

from __future__ import annotations

from dataclasses import replace

from weft.config.cluster import Cluster
from weft.model.profile import Profile
from weft.planning.learned._runs import PricedTerms
from weft.planning.price import CostModel, TimeTerms
from weft.techniques.cost_terms import DATASHEET, ComputeCorrection, Corrections, Layout

_OPERATOR_SECONDS = 1e-5
_COLLECTIVE_SECONDS = 1e-4


def price_step(profile: Profile, cluster: Cluster, layout: Layout, cores: float) -> PricedTerms:
    """Return the uncorrected price of a step in parts.

    How much of it belongs to each part is seen by pricing it again with that part changed, so that what hides behind
    something else, and how often, need not be known here.

    Raises:
        PlanError: the layout does not fit the model or the cluster.
    """

    def price(corrections: Corrections) -> TimeTerms:
        calibration = replace(DATASHEET, corrections=corrections)
        return CostModel(profile, cluster, calibration=calibration).predict(layout, exact=True).time

    def row(**changed: float) -> Corrections:
        return Corrections(compute=(ComputeCorrection(precision=layout.precision, cores=cores, **changed),))

    base = price(Corrections())
    computing, sent = _computing(base), _sent(base)
    plain = _computing(price(row(plain=2.0))) - computing
    convolutions = _computing(price(row(convolutions=2.0))) - computing
    copies = _sent(price(row(copies=2.0))) - sent
    operators = (_computing(price(row(operator_seconds=_OPERATOR_SECONDS))) - computing) / _OPERATOR_SECONDS
    collectives = (_sent(price(Corrections(collective_seconds=_COLLECTIVE_SECONDS))) - sent) / _COLLECTIVE_SECONDS
    parts = {
        "products": computing - plain - convolutions,
        "convolutions": convolutions,
        "plain": plain,
        "operators": operators,
        "copies": copies,
        "communication": sent - copies,
        "collectives": collectives,
        "bubble": base.bubble,
        "optimizer": base.optimizer,
        "other": base.other + base.offload,
    }
    # Four digits, for they are kept in a file that people read; differences of prices may end a hair below 0.
    return PricedTerms(**{name: max(float(f"{value:.4g}"), 0.0) for name, value in parts.items()})


def _computing(time: TimeTerms) -> float:
    return time.ideal + time.matrix_shapes + time.memory_bound + time.recompute


def _sent(time: TimeTerms) -> float:
    return time.tensor + time.context + time.expert + time.pipeline + time.data
