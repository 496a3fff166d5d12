"""Describe: any module to its profile, and a proposal of how it splits."""

from weft.analysis._describe import ForwardDescription as ForwardDescription
from weft.analysis._describe import describe as describe
from weft.analysis._describe import examine as examine
from weft.analysis._find_cut import find_cut as find_cut
from weft.analysis._find_experts import look_at_experts as look_at_experts
from weft.analysis._look import look as look
from weft.analysis._of_weights import describe_weights as describe_weights
from weft.analysis._stages import stage_lines as stage_lines
from weft.analysis.features._find_features import look_at_features as look_at_features
from weft.analysis.tensor_split._proposal import Proposal as Proposal
from weft.analysis.tensor_split._proposal import ProposedRule as ProposedRule
from weft.analysis.tensor_split._proposal import lines_of as lines_of
from weft.analysis.tensor_split._propose import propose_split as propose_split
from weft.analysis.tensor_split._table import try_table as try_table
from weft.analysis.tokens._find_sequence import SharedSequence as SharedSequence
from weft.analysis.tokens._find_sequence import find_shared_sequence as find_shared_sequence
from weft.analysis.tokens._find_sequence import look_at_tokens as look_at_tokens
