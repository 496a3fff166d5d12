"""Other training systems: what each can do, and how it is started on a plan.  Importable without torch."""

from weft.systems._contract import Emission as Emission
from weft.systems._contract import Job as Job
from weft.systems._emit import SYSTEMS as SYSTEMS
from weft.systems._emit import emit as emit
from weft.systems._emit import find_system as find_system
from weft.systems._emit import job_of as job_of
from weft.systems._emit import node_size as node_size
from weft.systems._facts import Facts as Facts
from weft.systems._search import Nearest as Nearest
from weft.systems._search import search_within as search_within
from weft.systems._show import emission_lines as emission_lines
from weft.systems._show import write_emission as write_emission
from weft.systems._system import System as System
