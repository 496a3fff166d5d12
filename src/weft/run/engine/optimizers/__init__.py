"""Optimizers over shards: one module each, which a rank imports where its recipe names it."""

from weft.run.engine.optimizers._base import ShardOptimizer as ShardOptimizer
from weft.run.engine.optimizers._create import create_optimizer as create_optimizer
from weft.run.engine.optimizers._sparse import SparseState as SparseState
from weft.run.engine.optimizers._sparse import check_sparse_support as check_sparse_support
from weft.run.engine.optimizers._sparse import check_sparse_tables as check_sparse_tables
from weft.run.engine.optimizers._sparse import sparse_step as sparse_step
from weft.run.engine.optimizers._sums import squared_sum as squared_sum
