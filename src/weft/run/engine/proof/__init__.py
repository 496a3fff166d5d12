"""The proof at the start of a training: two steps under its plan are those of plain PyTorch on one process."""

from typing import Literal

from weft.run.engine.proof._compare import Deviation as Deviation
from weft.run.engine.proof._compare import Verdict as Verdict
from weft.run.engine.proof._compare import compare_ranks as compare_ranks
from weft.run.engine.proof._compare import text_of_rank_0 as text_of_rank_0
from weft.run.engine.proof._kept import KeptProof as KeptProof
from weft.run.engine.proof._kept import digest_of as digest_of
from weft.run.engine.proof._kept import keep as keep
from weft.run.engine.proof._kept import read_kept as read_kept
from weft.run.engine.proof._of_recipe import few_microbatches as few_microbatches
from weft.run.engine.proof._of_recipe import optimizer_of as optimizer_of
from weft.run.engine.proof._of_recipe import set_rates as set_rates
from weft.run.engine.proof._of_recipe import whole_module as whole_module
from weft.run.engine.proof._plain import PlainResult as PlainResult
from weft.run.engine.proof._plain import PlainSteps as PlainSteps
from weft.run.engine.proof._plain import objective_of as objective_of
from weft.run.engine.proof._planned import StepsOfRank as StepsOfRank
from weft.run.engine.proof._planned import planned_steps as planned_steps
from weft.run.engine.proof._snapshot import Snapshot as Snapshot
from weft.run.engine.proof._words import difference_of as difference_of
from weft.run.engine.proof._words import failure_of as failure_of
from weft.run.engine.proof._words import is_of_plan as is_of_plan
from weft.run.engine.proof._words import line_of as line_of

ProveMode = Literal["auto", "always", "never"]
"""Whether a training proves itself: where that is cheap and has not been done, in any case, or not at all."""
