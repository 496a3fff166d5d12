"""Dry runs: one step of any rank of any world without its peers, on fake tensors or on a real device."""

from weft.verify.dry_run._agree import disagreements as disagreements
from weft.verify.dry_run._agree import peers_to_ask as peers_to_ask
from weft.verify.dry_run._agree import rank_at as rank_at
from weft.verify.dry_run._peak_memory import PeakMemory as PeakMemory
from weft.verify.dry_run._peak_memory import measure_peak_memory as measure_peak_memory
from weft.verify.dry_run._rehearse import RankReport as RankReport
from weft.verify.dry_run._rehearse import StateBytes as StateBytes
from weft.verify.dry_run._rehearse import rehearse as rehearse
from weft.verify.dry_run._traffic import plan_and_measured as plan_and_measured
from weft.verify.dry_run._traffic import unlike_plan as unlike_plan
from weft.verify.dry_run._witness import Issued as Issued
from weft.verify.dry_run._world import WorldReport as WorldReport
from weft.verify.dry_run._world import rehearse_world as rehearse_world
from weft.verify.dry_run._world import representative_ranks as representative_ranks
from weft.verify.dry_run.outline_of import outline_of as outline_of
from weft.verify.dry_run.outline_of import outline_or_reason as outline_or_reason
