"""The terms of a rank's sends, without torch: an outline of the model, a rank's share of it, and one kind of send."""

from weft.techniques.send_trace._outline import BlockEntry as BlockEntry
from weft.techniques.send_trace._outline import CallKind as CallKind
from weft.techniques.send_trace._outline import ModuleCall as ModuleCall
from weft.techniques.send_trace._outline import Outline as Outline
from weft.techniques.send_trace._outline import Parameter as Parameter
from weft.techniques.send_trace._outline import SampleGather as SampleGather
from weft.techniques.send_trace._outline import Shape as Shape
from weft.techniques.send_trace._outline import TensorCut as TensorCut
from weft.techniques.send_trace._send import Operation as Operation
from weft.techniques.send_trace._send import Phase as Phase
from weft.techniques.send_trace._send import RankSend as RankSend
from weft.techniques.send_trace._send import When as When
from weft.techniques.send_trace._share import HeldParameter as HeldParameter
from weft.techniques.send_trace._share import ModelShare as ModelShare
from weft.techniques.send_trace._share import Part as Part
