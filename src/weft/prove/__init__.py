"""Prove that a plan computes what one process computes: the same gradients, the same losses."""

from weft.prove._compare import TOLERANCES as TOLERANCES
from weft.prove._compare import Difference as Difference
from weft.prove._compare import assemble as assemble
from weft.prove._compare import compare as compare
from weft.prove._trial import Trial as Trial
from weft.prove._trial import one_process as one_process
from weft.prove._trial import run_trial as run_trial
from weft.prove._trial_data import TrialData as TrialData
