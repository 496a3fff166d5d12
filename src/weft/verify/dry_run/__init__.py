"""Dry runs: one step of any rank of any world without its peers, on fake tensors or on a real device."""

from weft.verify.dry_run._agree import disagreements as disagreements
from weft.verify.dry_run._agree import peers_to_ask as peers_to_ask
from weft.verify.dry_run._agree import rank_at as rank_at
from weft.verify.dry_run._collective_recorder import IssuedCollective as IssuedCollective
from weft.verify.dry_run._dry_run import RankReport as RankReport
from weft.verify.dry_run._dry_run import StateBytes as StateBytes
from weft.verify.dry_run._dry_run import dry_run_rank as dry_run_rank
from weft.verify.dry_run._peak_memory import PeakMemory as PeakMemory
from weft.verify.dry_run._peak_memory import measure_peak_memory as measure_peak_memory
from weft.verify.dry_run._traffic import plan_and_measured as plan_and_measured
from weft.verify.dry_run._traffic import unlike_plan as unlike_plan
from weft.verify.dry_run._world import WorldReport as WorldReport
from weft.verify.dry_run._world import dry_run_world as dry_run_world
from weft.verify.dry_run._world import representative_ranks as representative_ranks
from weft.verify.dry_run.trace_sends import trace_sends as trace_sends
from weft.verify.dry_run.trace_sends import trace_sends_or_reason as trace_sends_or_reason
