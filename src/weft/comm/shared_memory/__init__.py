"""The backend `weft`: collectives between the ranks of one host through memory that they share.

Only registering it is here; `engine`, `group` and `forming` are loaded when such a group is made.
"""

from weft.comm.shared_memory._backend import BACKEND as BACKEND
from weft.comm.shared_memory._backend import register_shared_memory_backend as register_shared_memory_backend
from weft.comm.shared_memory._backend import shared_memory_group as shared_memory_group
