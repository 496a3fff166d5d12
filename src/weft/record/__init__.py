"""What a run leaves behind: its folder, metrics, logs, and where the time went."""

from weft.record._bucket_advice import BucketAdvice as BucketAdvice
from weft.record._bucket_advice import advise_bucket as advise_bucket
from weft.record._collectives import CollectiveLog as CollectiveLog
from weft.record._collectives import Traffic as Traffic
from weft.record._logs import RankFilter as RankFilter
from weft.record._logs import rank_logging as rank_logging
from weft.record._metrics import Metric as Metric
from weft.record._metrics import MetricsWriter as MetricsWriter
from weft.record._recorder import PHASES as PHASES
from weft.record._recorder import Recorder as Recorder
from weft.record._recorder import Span as Span
from weft.record._run_folder import RunFolder as RunFolder
