"""The ways in: `train`, `session` for a loop of one's own and `spawn` for its ranks, `generate`."""

from weft.api.planning.describe import describe_recipe as describe_recipe
from weft.api.planning.settings import session_arguments as session_arguments
from weft.api.prepared.state import TrainState as TrainState
from weft.api.ranks.recording import run_name as run_name
from weft.api.saving.export import export as export
from weft.api.sessions.join import session as session
from weft.api.sessions.join import spawn as spawn
from weft.api.sessions.session import Session as Session
from weft.api.sessions.session import SessionInternals as SessionInternals
from weft.api.training.check import check as check
from weft.api.training.check import check_by as check_by
from weft.api.training.check_report import CheckFailure as CheckFailure
from weft.api.training.check_report import CheckReport as CheckReport
from weft.api.training.generate import generate as generate
from weft.api.training.generate import load_module as load_module
from weft.api.training.time_trials import TimedPlan as TimedPlan
from weft.api.training.time_trials import decide_by_trials as decide_by_trials
from weft.api.training.time_trials import step_seconds as step_seconds
from weft.api.training.time_trials import time_plans as time_plans
from weft.api.training.train import RunResult as RunResult
from weft.api.training.train import train as train
from weft.run.worker import training_of as training_of
