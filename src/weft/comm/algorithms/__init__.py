"""Collective algorithms as data: what each rank sends to whom, what it costs, and where it fits.  Needs no torch.

One file per algorithm; `ALGORITHMS` names them all.
"""

from weft.comm.algorithms._arrange import Arrangement as Arrangement
from weft.comm.algorithms._arrange import arrange as arrange
from weft.comm.algorithms._arrange import flat as flat
from weft.comm.algorithms._arrange import near_square as near_square
from weft.comm.algorithms._arrange import snake as snake
from weft.comm.algorithms._build import build_schedule as build_schedule
from weft.comm.algorithms._choices import BUILT_IN as BUILT_IN
from weft.comm.algorithms._choices import AlgorithmsBySize as AlgorithmsBySize
from weft.comm.algorithms._choices import SizeRange as SizeRange
from weft.comm.algorithms._choices import defines as defines
from weft.comm.algorithms._choices import format_size as format_size
from weft.comm.algorithms._choices import parse_choices as parse_choices
from weft.comm.algorithms._choices import parse_size as parse_size
from weft.comm.algorithms._choices import stand_in as stand_in
from weft.comm.algorithms._method import Algorithm as Algorithm
from weft.comm.algorithms._method import Links as Links
from weft.comm.algorithms._registry import ALGORITHMS as ALGORITHMS
from weft.comm.algorithms._registry import find_algorithm as find_algorithm
from weft.comm.algorithms._schedule import NodeRound as NodeRound
from weft.comm.algorithms._schedule import Receive as Receive
from weft.comm.algorithms._schedule import Run as Run
from weft.comm.algorithms._schedule import Runs as Runs
from weft.comm.algorithms._schedule import Schedule as Schedule
from weft.comm.algorithms._schedule import Send as Send
from weft.comm.algorithms._schedule import Step as Step
from weft.comm.algorithms._shortlist import MethodCandidate as MethodCandidate
from weft.comm.algorithms._shortlist import fit_links as fit_links
from weft.comm.algorithms._shortlist import predict as predict
from weft.comm.algorithms._shortlist import shortlist as shortlist
from weft.comm.algorithms._table import ChoiceTable as ChoiceTable
from weft.comm.algorithms._table import TableRow as TableRow
from weft.comm.algorithms._table import decide as decide
from weft.comm.algorithms._table import find_table as find_table
from weft.comm.algorithms._table import keep_table as keep_table
from weft.comm.algorithms._table import table_from_json as table_from_json
from weft.comm.algorithms._table import table_path as table_path
from weft.comm.algorithms._table import table_to_json as table_to_json
from weft.comm.algorithms._table import tables_of_others as tables_of_others
