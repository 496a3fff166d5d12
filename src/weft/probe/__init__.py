"""Probe: measure a machine or a job's nodes, and describe them as a cluster."""

from weft.probe._probe import BUDGET_SECONDS as BUDGET_SECONDS
from weft.probe._probe import measure_as_rank as measure_as_rank
from weft.probe._probe import probe as probe
