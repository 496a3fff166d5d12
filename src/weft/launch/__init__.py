"""Launch: start ranks on this machine, watch them, and end them all.  Importable without torch."""

from weft.launch._distributed import Distributed as Distributed
from weft.launch._distributed import initialise_distributed as initialise_distributed
from weft.launch._handle import Nursery as Nursery
from weft.launch._handle import open_nursery as open_nursery
from weft.launch._launcher import RankError as RankError
from weft.launch._launcher import launch_function as launch_function
from weft.launch._launcher import launch_script as launch_script
from weft.launch._place import Place as Place
from weft.launch._place import place_from_environment as place_from_environment
from weft.launch._word import Lost as Lost
