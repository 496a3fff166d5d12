"""The ways in: `train`, `session` for a loop of one's own and `spawn` for its ranks, `generate`."""

from weft.entry._auto import describe_recipe as describe_recipe
from weft.entry._check import check as check
from weft.entry._check import check_by as check_by
from weft.entry._check_report import CheckFailure as CheckFailure
from weft.entry._check_report import CheckReport as CheckReport
from weft.entry._export import export as export
from weft.entry._generate import generate as generate
from weft.entry._generate import load_module as load_module
from weft.entry._joining import session as session
from weft.entry._recording import run_name as run_name
from weft.entry._session import Session as Session
from weft.entry._settings import session_arguments as session_arguments
from weft.entry._spawn import spawn as spawn
from weft.entry._state import TrainState as TrainState
from weft.entry._timed import TimedPlan as TimedPlan
from weft.entry._timed import step_seconds as step_seconds
from weft.entry._timed import time_plans as time_plans
from weft.entry._train import RunResult as RunResult
from weft.entry._train import train as train
from weft.entry._trials import decide_by_trials as decide_by_trials
from weft.worker import training_of as training_of
