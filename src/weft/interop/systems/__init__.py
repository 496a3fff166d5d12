"""Other training systems: what each can do, and how it is started on a plan.  No torch."""

from weft.interop.systems._contract import Emission as Emission
from weft.interop.systems._contract import SystemJob as SystemJob
from weft.interop.systems._emit import SYSTEMS as SYSTEMS
from weft.interop.systems._emit import emit as emit
from weft.interop.systems._emit import find_system as find_system
from weft.interop.systems._emit import job_of as job_of
from weft.interop.systems._emit import node_size as node_size
from weft.interop.systems._facts import SystemFacts as SystemFacts
from weft.interop.systems._search import NearestPlans as NearestPlans
from weft.interop.systems._search import search_within as search_within
from weft.interop.systems._show import emission_lines as emission_lines
from weft.interop.systems._show import write_emission as write_emission
from weft.interop.systems._system import System as System
