"""Prepared token corpora, images, the world-independent sampler, and batches.  Importable without torch.

What ranks read; `weft.run.data.preparation` is what is done before they start.
"""

from weft.run.data._batches import BatchSource as BatchSource
from weft.run.data._batches import open_data as open_data
from weft.run.data._fields import IGNORED as IGNORED
from weft.run.data._keyed import Permutation as Permutation
from weft.run.data._prepared import PreparedData as PreparedData
from weft.run.data._sampler import Blend as Blend
from weft.run.data._sampler import Sampler as Sampler
from weft.run.data._sampler import rank_range as rank_range
from weft.run.data._shape import DataShape as DataShape
from weft.run.data._shape import data_shape as data_shape
