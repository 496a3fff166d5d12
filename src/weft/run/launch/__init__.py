"""Starts ranks on this machine, watches them, and ends them all.  Importable without torch.

Here is what ranks themselves need; what starts them is `weft.run.launch.launcher`.
"""

from weft.run.launch._distributed import Distributed as Distributed
from weft.run.launch._distributed import initialise_distributed as initialise_distributed
from weft.run.launch._failure_notice import RankFailure as RankFailure
from weft.run.launch._rank_info import FAILURE_SECONDS as FAILURE_SECONDS
from weft.run.launch._rank_info import HAND_OVER as HAND_OVER
from weft.run.launch._rank_info import RankInfo as RankInfo
from weft.run.launch._threads import threads_of_user as threads_of_user
