"""Price: the time and the memory of a step under a layout, without torch and without devices."""

from weft.price._calibration import DATASHEET as DATASHEET
from weft.price._calibration import FITTED as FITTED
from weft.price._calibration import Calibration as Calibration
from weft.price._check_layout import check_layout as check_layout
from weft.price._habits import HABITS as HABITS
from weft.price._habits import MemoryHabits as MemoryHabits
from weft.price._layout import Layout as Layout
from weft.price._layout import PricedPrecision as PricedPrecision
from weft.price._memory import Memories as Memories
from weft.price._memory import memory_of as memory_of
from weft.price._predict import Pricer as Pricer
from weft.price._predict import model_flops as model_flops
from weft.price._predict import predict as predict
from weft.price._prediction import MemoryKinds as MemoryKinds
from weft.price._prediction import Prediction as Prediction
from weft.price._prediction import Span as Span
from weft.price._prediction import StageMemory as StageMemory
from weft.price._prediction import TimeTerms as TimeTerms
from weft.price._stack import STACKS as STACKS
from weft.price._stack import WEFT as WEFT
from weft.price._stack import Stack as Stack
from weft.price._stages import BlockCost as BlockCost
from weft.price._stages import PassCost as PassCost
from weft.price._timeline import StageTimes as StageTimes
from weft.price._timeline import Timelines as Timelines
from weft.price._timeline import closed_form as closed_form
