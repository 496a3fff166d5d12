"""Data: prepared token corpora, images, the world-independent sampler, and batches.  Importable without torch."""

from weft.data._batches import BatchSource as BatchSource
from weft.data._corpus import PreparedCorpus as PreparedCorpus
from weft.data._corpus import TokenStream as TokenStream
from weft.data._corpus import is_prepared as is_prepared
from weft.data._corpus import open_corpus as open_corpus
from weft.data._fields import IGNORED as IGNORED
from weft.data._keyed import Permutation as Permutation
from weft.data._open import DataModule as DataModule
from weft.data._open import PreparedData as PreparedData
from weft.data._open import open_data as open_data
from weft.data._open import prepare_data as prepare_data
from weft.data._order import PlainSamples as PlainSamples
from weft.data._order import write_samples as write_samples
from weft.data._prepare import prepare as prepare
from weft.data._progress import ConsoleProgress as ConsoleProgress
from weft.data._progress import Progress as Progress
from weft.data._progress import silent as silent
from weft.data._sampler import Blend as Blend
from weft.data._sampler import Sampler as Sampler
from weft.data._sampler import rank_range as rank_range
from weft.data._sampler import rank_share as rank_share
from weft.data._shape import DataShape as DataShape
from weft.data._shape import data_shape as data_shape
from weft.data._tokenizer import load_tokenizer as load_tokenizer
from weft.data._tokenizer import separator_of as separator_of
