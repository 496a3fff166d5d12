"""The profile of a model: what it computes, keeps and sends, block by block.  No torch."""

from weft.model.profile._parts import STATISTIC_BYTES as STATISTIC_BYTES
from weft.model.profile._parts import linear as linear
from weft.model.profile._profile import Block as Block
from weft.model.profile._profile import Operator as Operator
from weft.model.profile._profile import OperatorKind as OperatorKind
from weft.model.profile._profile import OperatorSplit as OperatorSplit
from weft.model.profile._profile import Profile as Profile
from weft.model.profile._profile import last_of_experts as last_of_experts
from weft.model.profile._profile import why_no_pipeline as why_no_pipeline
from weft.model.profile._sizes import Activation as Activation
from weft.model.profile._sizes import ModelSizes as ModelSizes
from weft.model.profile._transformer import profile_of_sizes as profile_of_sizes
