"""Measures a machine or a job's nodes as a cluster, and which collectives suit it."""

from weft.run.probe._choices import measure_choices as measure_choices
from weft.run.probe._choices import measure_choices_as_rank as measure_choices_as_rank
from weft.run.probe._probe import BUDGET_SECONDS as BUDGET_SECONDS
from weft.run.probe._probe import measure_as_rank as measure_as_rank
from weft.run.probe._probe import probe as probe
