"""The ways in: `train`, `session` for a loop of one's own and `spawn` for its ranks, `generate`."""

from weft.api._auto import describe_recipe as describe_recipe
from weft.api._check import check as check
from weft.api._check import check_by as check_by
from weft.api._check_report import CheckFailure as CheckFailure
from weft.api._check_report import CheckReport as CheckReport
from weft.api._export import export as export
from weft.api._generate import generate as generate
from weft.api._generate import load_module as load_module
from weft.api._joining import session as session
from weft.api._recording import run_name as run_name
from weft.api._session import Session as Session
from weft.api._settings import session_arguments as session_arguments
from weft.api._spawn import spawn as spawn
from weft.api._state import TrainState as TrainState
from weft.api._timed import TimedPlan as TimedPlan
from weft.api._timed import step_seconds as step_seconds
from weft.api._timed import time_plans as time_plans
from weft.api._train import RunResult as RunResult
from weft.api._train import train as train
from weft.api._trials import decide_by_trials as decide_by_trials
from weft.run.worker import training_of as training_of
