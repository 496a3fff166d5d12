"""Explains a plan: why it is the best one, what it costs, and what another would cost.  No torch."""

from weft.planning.explain._next import SuggestedChange as SuggestedChange
from weft.planning.explain._next import next_changes as next_changes
from weft.planning.explain._plots import PICTURES as PICTURES
from weft.planning.explain._plots import draw as draw
from weft.planning.explain._reasons import search_reasons as search_reasons
from weft.planning.explain._table import learned_lines as learned_lines
from weft.planning.explain._table import plan_table as plan_table
from weft.planning.explain._table import search_document as search_document
from weft.planning.explain._table import search_lines as search_lines
from weft.planning.explain._table import what_it_costs as what_it_costs
from weft.planning.explain._text import imbalance_line as imbalance_line
from weft.planning.explain._text import layout_line as layout_line
from weft.planning.explain._text import memory_line as memory_line
from weft.planning.explain._text import time_line as time_line
from weft.planning.explain._text import waterfall as waterfall
from weft.planning.explain._why_not import explain_choice as explain_choice
