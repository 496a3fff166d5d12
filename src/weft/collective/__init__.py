"""Collective algorithms as data: what each rank sends to whom, what it costs, and where it fits.  Needs no torch.

One file per algorithm; `ALGORITHMS` names them all.
"""

from weft.collective._arrange import Arrangement as Arrangement
from weft.collective._arrange import arrange as arrange
from weft.collective._arrange import flat as flat
from weft.collective._arrange import snake as snake
from weft.collective._picture import draw_rounds as draw_rounds
from weft.collective._registry import ALGORITHMS as ALGORITHMS
from weft.collective._registry import Algorithm as Algorithm
from weft.collective._registry import Links as Links
from weft.collective._registry import Method as Method
from weft.collective._registry import build_schedule as build_schedule
from weft.collective._registry import find_algorithm as find_algorithm
from weft.collective._rounds import Drawing as Drawing
from weft.collective._rounds import drawing_lines as drawing_lines
from weft.collective._rounds import play_out as play_out
from weft.collective._schedule import Receive as Receive
from weft.collective._schedule import Run as Run
from weft.collective._schedule import Runs as Runs
from weft.collective._schedule import Schedule as Schedule
from weft.collective._schedule import Send as Send
from weft.collective._schedule import Step as Step
from weft.collective._simulate import Flight as Flight
from weft.collective._simulate import Outcome as Outcome
from weft.collective._simulate import simulate as simulate
