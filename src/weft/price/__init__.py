"""Price: the time and the memory of a step under a layout, without torch and without devices."""

from weft.price._layout import Layout as Layout
from weft.price._layout import PricedPrecision as PricedPrecision
from weft.price._prediction import MemoryKinds as MemoryKinds
from weft.price._prediction import Prediction as Prediction
from weft.price._prediction import Span as Span
from weft.price._prediction import StageMemory as StageMemory
from weft.price._prediction import TimeTerms as TimeTerms
from weft.price._stack import STACKS as STACKS
from weft.price._stack import WEFT as WEFT
from weft.price._stack import Stack as Stack
