"""Optimizers over shards: one module each, which a rank imports where its recipe names it."""

from weft.engine.optimizers._base import ShardOptimizer as ShardOptimizer
from weft.engine.optimizers._create import create_optimizer as create_optimizer
from weft.engine.optimizers._sparse import SparseState as SparseState
from weft.engine.optimizers._sparse import check_sparse_support as check_sparse_support
from weft.engine.optimizers._sparse import check_sparse_tables as check_sparse_tables
from weft.engine.optimizers._sparse import sparse_step as sparse_step
from weft.engine.optimizers._sums import squared_sum as squared_sum
