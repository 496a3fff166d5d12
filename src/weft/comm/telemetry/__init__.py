"""Where the time of a run went: spans, collectives, and what follows for buckets."""

from weft.comm.telemetry._collectives import CollectiveLog as CollectiveLog
from weft.comm.telemetry._collectives import StepTraffic as StepTraffic
from weft.comm.telemetry._collectives import Traffic as Traffic
from weft.comm.telemetry._recorder import PHASES as PHASES
from weft.comm.telemetry._recorder import Recorder as Recorder
from weft.comm.telemetry._recorder import Span as Span
