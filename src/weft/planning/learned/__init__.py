"""What recorded runs of this machine teach its prices: kept in the user's cache, fitted when asked for.  No torch."""

from weft.planning.learned._fit import corrected_step as corrected_step
from weft.planning.learned._fit import corrections_of as corrections_of
from weft.planning.learned._learned import NOTHING_LEARNED as NOTHING_LEARNED
from weft.planning.learned._learned import Learned as Learned
from weft.planning.learned._learned import learned_here as learned_here
from weft.planning.learned._price import price_step as price_step
from weft.planning.learned._runs import MOST_DESCHEDULED as MOST_DESCHEDULED
from weft.planning.learned._runs import MeasuredTerms as MeasuredTerms
from weft.planning.learned._runs import PricedTerms as PricedTerms
from weft.planning.learned._runs import RecordedRun as RecordedRun
from weft.planning.learned._runs import formulas_digest as formulas_digest
from weft.planning.learned._runs import keep_run as keep_run
from weft.planning.learned._runs import kept_runs as kept_runs
from weft.planning.learned._runs import runs_path as runs_path
from weft.planning.learned._runs import torch_version as torch_version
