"""Data: prepared token corpora, images, the world-independent sampler, and batches.  Importable without torch.

What ranks read; `weft.data.preparation` is what is done before they start.
"""

from weft.data._batches import BatchSource as BatchSource
from weft.data._batches import open_data as open_data
from weft.data._fields import IGNORED as IGNORED
from weft.data._keyed import Permutation as Permutation
from weft.data._prepared import PreparedData as PreparedData
from weft.data._sampler import Blend as Blend
from weft.data._sampler import Sampler as Sampler
from weft.data._sampler import rank_range as rank_range
from weft.data._shape import DataShape as DataShape
from weft.data._shape import data_shape as data_shape
