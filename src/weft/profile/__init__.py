"""Profile: what a model computes, keeps and sends, block by block, without torch."""

from weft.profile._parts import STATISTIC_BYTES as STATISTIC_BYTES
from weft.profile._parts import linear as linear
from weft.profile._profile import Block as Block
from weft.profile._profile import Operator as Operator
from weft.profile._profile import OperatorKind as OperatorKind
from weft.profile._profile import OperatorSplit as OperatorSplit
from weft.profile._profile import Profile as Profile
from weft.profile._profile import last_of_experts as last_of_experts
from weft.profile._profile import why_no_pipeline as why_no_pipeline
from weft.profile._sizes import Activation as Activation
from weft.profile._sizes import ModelSizes as ModelSizes
from weft.profile._transformer import profile_of_sizes as profile_of_sizes
