"""Prices a layout: the time and the memory of a step, without devices.  No torch."""

from weft.planning.price._accuracy import Accuracy as Accuracy
from weft.planning.price._accuracy import accuracy as accuracy
from weft.planning.price._block_memory import BlockMemory as BlockMemory
from weft.planning.price._block_memory import memory_key as memory_key
from weft.planning.price._check_layout import check_layout as check_layout
from weft.planning.price._collectives import algorithm_choices as algorithm_choices
from weft.planning.price._collectives import choose_algorithm as choose_algorithm
from weft.planning.price._collectives import collective_seconds as collective_seconds
from weft.planning.price._memory import Memories as Memories
from weft.planning.price._placement import PricedBlock as PricedBlock
from weft.planning.price._placement import price_blocks as price_blocks
from weft.planning.price._predict import CostModel as CostModel
from weft.planning.price._predict import model_flops as model_flops
from weft.planning.price._predict import predict as predict
from weft.planning.price._prediction import MemoryKinds as MemoryKinds
from weft.planning.price._prediction import Prediction as Prediction
from weft.planning.price._prediction import ScheduleSpan as ScheduleSpan
from weft.planning.price._prediction import StageMemory as StageMemory
from weft.planning.price._prediction import TimeTerms as TimeTerms
from weft.planning.price._rank_memory import RankMemory as RankMemory
from weft.planning.price._rank_memory import RankShare as RankShare
from weft.planning.price._stages import BlockCost as BlockCost
from weft.planning.price._update import optimizer_seconds as optimizer_seconds
