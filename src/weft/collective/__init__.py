"""Collective algorithms as data: what each rank sends to whom, what it costs, and where it fits.  Needs no torch.

One file per algorithm; `ALGORITHMS` names them all.
"""

from weft.collective._arrange import Arrangement as Arrangement
from weft.collective._arrange import arrange as arrange
from weft.collective._arrange import flat as flat
from weft.collective._arrange import near_square as near_square
from weft.collective._arrange import snake as snake
from weft.collective._build import build_schedule as build_schedule
from weft.collective._choices import BUILT_IN as BUILT_IN
from weft.collective._choices import AlgorithmsBySize as AlgorithmsBySize
from weft.collective._choices import SizeRange as SizeRange
from weft.collective._choices import defines as defines
from weft.collective._choices import parse_choices as parse_choices
from weft.collective._choices import parse_size as parse_size
from weft.collective._choices import spell_size as spell_size
from weft.collective._choices import stand_in as stand_in
from weft.collective._method import Algorithm as Algorithm
from weft.collective._method import Links as Links
from weft.collective._registry import ALGORITHMS as ALGORITHMS
from weft.collective._registry import find_algorithm as find_algorithm
from weft.collective._schedule import NodeRound as NodeRound
from weft.collective._schedule import Receive as Receive
from weft.collective._schedule import Run as Run
from weft.collective._schedule import Runs as Runs
from weft.collective._schedule import Schedule as Schedule
from weft.collective._schedule import Send as Send
from weft.collective._schedule import Step as Step
from weft.collective._shortlist import MethodCandidate as MethodCandidate
from weft.collective._shortlist import fit_links as fit_links
from weft.collective._shortlist import predict as predict
from weft.collective._shortlist import shortlist as shortlist
from weft.collective._table import ChoiceTable as ChoiceTable
from weft.collective._table import TableRow as TableRow
from weft.collective._table import decide as decide
from weft.collective._table import find_table as find_table
from weft.collective._table import keep_table as keep_table
from weft.collective._table import table_from_json as table_from_json
from weft.collective._table import table_path as table_path
from weft.collective._table import table_to_json as table_to_json
from weft.collective._table import tables_of_others as tables_of_others
