"""Where the time of a run went: spans, collectives, and what follows for buckets."""

from weft.record._collectives import CollectiveLog as CollectiveLog
from weft.record._collectives import StepTraffic as StepTraffic
from weft.record._collectives import Traffic as Traffic
from weft.record._recorder import PHASES as PHASES
from weft.record._recorder import Recorder as Recorder
from weft.record._recorder import Span as Span
