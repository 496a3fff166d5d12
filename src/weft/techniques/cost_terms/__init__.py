"""What the cost of a step is computed of: a flat layout, groups of ranks, a device, and what one rank sends.  No torch.

`cost.py` of a technique reads these terms, and `weft.planning.price` adds up what it says.
"""

from weft.techniques.cost_terms._calibration import DATASHEET as DATASHEET
from weft.techniques.cost_terms._calibration import FITTED as FITTED
from weft.techniques.cost_terms._calibration import Calibration as Calibration
from weft.techniques.cost_terms._compute import Device as Device
from weft.techniques.cost_terms._compute import OperatorWork as OperatorWork
from weft.techniques.cost_terms._compute import Share as Share
from weft.techniques.cost_terms._compute import Work as Work
from weft.techniques.cost_terms._compute import operator_work as operator_work
from weft.techniques.cost_terms._corrections import ComputeCorrection as ComputeCorrection
from weft.techniques.cost_terms._corrections import Corrections as Corrections
from weft.techniques.cost_terms._framework import WEFT as WEFT
from weft.techniques.cost_terms._framework import Framework as Framework
from weft.techniques.cost_terms._framework_memory import FrameworkMemory as FrameworkMemory
from weft.techniques.cost_terms._kept import BoundedCache as BoundedCache
from weft.techniques.cost_terms._layout import ELEMENT_BYTES as ELEMENT_BYTES
from weft.techniques.cost_terms._layout import Layout as Layout
from weft.techniques.cost_terms._layout import PricedPrecision as PricedPrecision
from weft.techniques.cost_terms._layout import layout_settings as layout_settings
from weft.techniques.cost_terms._network import slot_numbers as slot_numbers
from weft.techniques.cost_terms._placement import AxisGroup as AxisGroup
from weft.techniques.cost_terms._placement import CostLine as CostLine
from weft.techniques.cost_terms._placement import Groups as Groups
from weft.techniques.cost_terms._placement import Leg as Leg
from weft.techniques.cost_terms._placement import Network as Network
from weft.techniques.cost_terms._terms import CostKey as CostKey
from weft.techniques.cost_terms._terms import PassCost as PassCost
from weft.techniques.cost_terms._terms import RankLoad as RankLoad
from weft.techniques.cost_terms._terms import Seconds as Seconds
from weft.techniques.cost_terms._terms import Sender as Sender
from weft.techniques.cost_terms._terms import Works as Works
