"""Describe: any module to its profile, and a proposal of how it splits."""

from weft.describe._describe import ForwardDescription as ForwardDescription
from weft.describe._describe import describe as describe
from weft.describe._describe import examine as examine
from weft.describe._find_cut import find_cut as find_cut
from weft.describe._find_experts import look_at_experts as look_at_experts
from weft.describe._find_features import look_at_features as look_at_features
from weft.describe._find_sequence import SharedSequence as SharedSequence
from weft.describe._find_sequence import find_shared_sequence as find_shared_sequence
from weft.describe._find_sequence import look_at_tokens as look_at_tokens
from weft.describe._look import look as look
from weft.describe._of_weights import describe_weights as describe_weights
from weft.describe._proposal import Proposal as Proposal
from weft.describe._proposal import ProposedRule as ProposedRule
from weft.describe._proposal import lines_of as lines_of
from weft.describe._propose import propose_split as propose_split
from weft.describe._stages import stage_lines as stage_lines
from weft.describe._table import try_table as try_table
