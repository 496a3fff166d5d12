"""Searches the layouts of a model on a cluster, priced and ranked.  No torch."""

from weft.planning.search._acceptance import Acceptance as Acceptance
from weft.planning.search._choose import PlanChoice as PlanChoice
from weft.planning.search._choose import choose_plan as choose_plan
from weft.planning.search._choose import explain_settings as explain_settings
from weft.planning.search._convert import plan_of as plan_of
from weft.planning.search._deadline import SmallestCluster as SmallestCluster
from weft.planning.search._deadline import part_of_cluster as part_of_cluster
from weft.planning.search._deadline import smallest_cluster as smallest_cluster
from weft.planning.search._default_batch import DefaultBatch as DefaultBatch
from weft.planning.search._default_batch import default_batch as default_batch
from weft.planning.search._for_devices import plan_for_devices as plan_for_devices
from weft.planning.search._objective import OBJECTIVES as OBJECTIVES
from weft.planning.search._objective import Objective as Objective
from weft.planning.search._orders import distinct_orders as distinct_orders
from weft.planning.search._pins import beyond_search as beyond_search
from weft.planning.search._pins import pinned as pinned
from weft.planning.search._recipe_space import recipe_space as recipe_space
from weft.planning.search._result import Candidate as Candidate
from weft.planning.search._result import Counts as Counts
from weft.planning.search._result import SearchResult as SearchResult
from weft.planning.search._result import candidate_of as candidate_of
from weft.planning.search._search import search as search
from weft.planning.search._shares import unequal_shares as unequal_shares
from weft.planning.search._space import Space as Space
from weft.planning.search._space import space_of as space_of
