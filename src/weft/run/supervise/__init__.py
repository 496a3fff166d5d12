"""Keeps a run going: judges how its ranks ended and starts them again from what is saved.  Importable without torch."""

from weft.run.supervise._failure import FailureKind as FailureKind
from weft.run.supervise._failure import GenerationFailure as GenerationFailure
from weft.run.supervise._failure import failure_of as failure_of
from weft.run.supervise._failure import kernel_memory_kills as kernel_memory_kills
from weft.run.supervise._failure import made_steps as made_steps
from weft.run.supervise._failure_rate import FailureRate as FailureRate
from weft.run.supervise._loss_spike import LossSpikeWatch as LossSpikeWatch
from weft.run.supervise._plan_changes import FoundPlan as FoundPlan
from weft.run.supervise._plan_changes import PlanChanges as PlanChanges
from weft.run.supervise._policy import PolicyTexts as PolicyTexts
from weft.run.supervise._policy import Restart as Restart
from weft.run.supervise._policy import RestartPolicy as RestartPolicy
from weft.run.supervise._policy import Shrink as Shrink
from weft.run.supervise._policy import Stop as Stop
from weft.run.supervise._signals import SupervisorSignals as SupervisorSignals
from weft.run.supervise._supervisor import PlanChange as PlanChange
from weft.run.supervise._supervisor import Supervisor as Supervisor
from weft.run.supervise._supervisor import log_between as log_between
from weft.run.supervise._supervisor import report_end as report_end
