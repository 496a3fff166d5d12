"""What a rank's program is made of, without torch: an outline of the model, a rank's share of it, and what it sends."""

from weft.outline._outline import BlockEntry as BlockEntry
from weft.outline._outline import CallKind as CallKind
from weft.outline._outline import ModuleCall as ModuleCall
from weft.outline._outline import Outline as Outline
from weft.outline._outline import Parameter as Parameter
from weft.outline._outline import SampleGather as SampleGather
from weft.outline._outline import Shape as Shape
from weft.outline._outline import TensorCut as TensorCut
from weft.outline._send import Operation as Operation
from weft.outline._send import Phase as Phase
from weft.outline._send import RankSend as RankSend
from weft.outline._send import When as When
from weft.outline._share import HeldParameter as HeldParameter
from weft.outline._share import ModelShare as ModelShare
from weft.outline._share import Part as Part
