"""The backend `weft`: collectives between the ranks of one host through memory that they share."""

from weft.comm.shared_memory._backend import BACKEND as BACKEND
from weft.comm.shared_memory._backend import register_shared_memory_backend as register_shared_memory_backend
from weft.comm.shared_memory._backend import shared_memory_group as shared_memory_group
from weft.comm.shared_memory._engine import Engine as Engine
from weft.comm.shared_memory._engine import Manner as Manner
from weft.comm.shared_memory._group import SharedMemoryGroup as SharedMemoryGroup
