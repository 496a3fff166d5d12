"""Rehearse: one step of any rank of any world, without peers; and without devices and memory, or on a real one."""

from weft.rehearse._agree import disagreements as disagreements
from weft.rehearse._agree import peers_to_ask as peers_to_ask
from weft.rehearse._agree import rank_at as rank_at
from weft.rehearse._outline import outline_of as outline_of
from weft.rehearse._outline import outline_or_reason as outline_or_reason
from weft.rehearse._peak_memory import PeakMemory as PeakMemory
from weft.rehearse._peak_memory import measure_peak_memory as measure_peak_memory
from weft.rehearse._rehearse import RankReport as RankReport
from weft.rehearse._rehearse import StateBytes as StateBytes
from weft.rehearse._rehearse import rehearse as rehearse
from weft.rehearse._traffic import plan_and_measured as plan_and_measured
from weft.rehearse._traffic import unlike_plan as unlike_plan
from weft.rehearse._witness import Issued as Issued
from weft.rehearse._world import WorldReport as WorldReport
from weft.rehearse._world import rehearse_world as rehearse_world
from weft.rehearse._world import representative_ranks as representative_ranks
