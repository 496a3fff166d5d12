"""What a run says, who hears it, and the folder that it leaves.  Importable without torch."""

from weft.events._events import CheckpointEvent as CheckpointEvent
from weft.events._events import CollectiveEvent as CollectiveEvent
from weft.events._events import EndEvent as EndEvent
from weft.events._events import EvaluationEvent as EvaluationEvent
from weft.events._events import Event as Event
from weft.events._events import FailureEvent as FailureEvent
from weft.events._events import MemoryEvent as MemoryEvent
from weft.events._events import MessageEvent as MessageEvent
from weft.events._events import PhaseEvent as PhaseEvent
from weft.events._events import RateEvent as RateEvent
from weft.events._events import StartEvent as StartEvent
from weft.events._events import StepEvent as StepEvent
from weft.events._events import WarningEvent as WarningEvent
from weft.events._folder import RunFolder as RunFolder
from weft.events._logs import LogSink as LogSink
from weft.events._logs import loggers_to as loggers_to
from weft.events._metrics import MetricsSink as MetricsSink
from weft.events._metrics import MetricsWriter as MetricsWriter
from weft.events._run import Emitted as Emitted
from weft.events._run import Run as Run
from weft.events._run import Sink as Sink
from weft.events._terminal import TerminalSink as TerminalSink
from weft.events._terminal import WarningSink as WarningSink
from weft.events._words import format_duration as format_duration
from weft.events._words import format_loss as format_loss
