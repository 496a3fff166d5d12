"""Lossy compression of gradients on the wire, one codec per file; only a recipe can permit it."""

from weft.techniques.compression.codecs._compressor import Compressor as Compressor
from weft.techniques.compression.codecs._compressor import KeptTensor as KeptTensor
from weft.techniques.compression.codecs._compressor import Stages as Stages
from weft.techniques.compression.codecs._feedback import ErrorFeedback as ErrorFeedback
from weft.techniques.compression.codecs._frame import Frame as Frame
from weft.techniques.compression.codecs._frame import ParameterSpan as ParameterSpan
from weft.techniques.compression.codecs._frame import WireBytes as WireBytes
from weft.techniques.compression.codecs._reduction import Codec as Codec
from weft.techniques.compression.codecs._reduction import CodecSpec as CodecSpec
from weft.techniques.compression.codecs._reduction import CompressedReduction as CompressedReduction
from weft.techniques.compression.codecs._reduction import ReductionUnderWay as ReductionUnderWay
from weft.techniques.compression.codecs.advice import Estimate as Estimate
from weft.techniques.compression.codecs.advice import Exchange as Exchange
from weft.techniques.compression.codecs.advice import Link as Link
from weft.techniques.compression.codecs.advice import advise as advise
from weft.techniques.compression.codecs.advice import compressed as compressed
from weft.techniques.compression.codecs.advice import shapes_of_model as shapes_of_model
from weft.techniques.compression.codecs.advice import uncompressed as uncompressed
from weft.techniques.compression.codecs.advice import verdict as verdict
from weft.techniques.compression.codecs.bf16 import BFloat16 as BFloat16
from weft.techniques.compression.codecs.int8 import Int8 as Int8
from weft.techniques.compression.codecs.onebit import OneBitMomentum as OneBitMomentum
from weft.techniques.compression.codecs.powersgd import PowerSGD as PowerSGD
from weft.techniques.compression.codecs.randomk import RandomK as RandomK
from weft.techniques.compression.codecs.signsgd import SignSGD as SignSGD
from weft.techniques.compression.codecs.topk import TopK as TopK
