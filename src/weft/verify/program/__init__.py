"""Predicts the sends of a rank in a step, from recipe, plan and a send trace of the model.  No torch."""

from weft.verify.program._compare import Traffic as Traffic
from weft.verify.program._compare import differences as differences
from weft.verify.program._program import RankProgram as RankProgram
from weft.verify.program._program import occasions_of as occasions_of
from weft.verify.program._program import program_of as program_of
