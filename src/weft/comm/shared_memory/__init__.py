"""The backend `weft`: collectives between the ranks of one host through memory that they share."""

from weft.comm.shared_memory._backend import BACKEND as BACKEND
from weft.comm.shared_memory._backend import meet as meet
from weft.comm.shared_memory._backend import open_transport as open_transport
from weft.comm.shared_memory._backend import register_shared_memory_backend as register_shared_memory_backend
from weft.comm.shared_memory._backend import shared_memory_group as shared_memory_group
from weft.comm.shared_memory._call import DTYPES as DTYPES
from weft.comm.shared_memory._call import Call as Call
from weft.comm.shared_memory._call import Failure as Failure
from weft.comm.shared_memory._call import GroupFailed as GroupFailed
from weft.comm.shared_memory._call import Kind as Kind
from weft.comm.shared_memory._call import Region as Region
from weft.comm.shared_memory._call import Transport as Transport
from weft.comm.shared_memory._call import Trouble as Trouble
from weft.comm.shared_memory._engine import Engine as Engine
from weft.comm.shared_memory._engine import Manner as Manner
from weft.comm.shared_memory._failure import explain as explain
from weft.comm.shared_memory._group import SharedMemoryGroup as SharedMemoryGroup
