"""Lossy compression of gradients on the wire, one codec per file; only a recipe can permit it."""

from weft.comm.compress._compressor import Compressor as Compressor
from weft.comm.compress._compressor import Kept as Kept
from weft.comm.compress._compressor import Stages as Stages
from weft.comm.compress._feedback import ErrorFeedback as ErrorFeedback
from weft.comm.compress._frame import Frame as Frame
from weft.comm.compress._frame import Span as Span
from weft.comm.compress._frame import WireBytes as WireBytes
from weft.comm.compress._reduction import Codec as Codec
from weft.comm.compress._reduction import CompressedReduction as CompressedReduction
from weft.comm.compress._reduction import Compression as Compression
from weft.comm.compress._reduction import ReductionUnderWay as ReductionUnderWay
from weft.comm.compress.advice import Estimate as Estimate
from weft.comm.compress.advice import Exchange as Exchange
from weft.comm.compress.advice import Link as Link
from weft.comm.compress.advice import compressed as compressed
from weft.comm.compress.advice import shapes_of_model as shapes_of_model
from weft.comm.compress.advice import uncompressed as uncompressed
from weft.comm.compress.advice import verdict as verdict
from weft.comm.compress.bf16 import BFloat16 as BFloat16
from weft.comm.compress.int8 import Int8 as Int8
from weft.comm.compress.onebit import OneBitMomentum as OneBitMomentum
from weft.comm.compress.powersgd import PowerSGD as PowerSGD
from weft.comm.compress.randomk import RandomK as RandomK
from weft.comm.compress.signsgd import SignSGD as SignSGD
from weft.comm.compress.topk import TopK as TopK
