"""The ranks of a training.  A rank gets a finished plan, and knows nothing of how plans are found."""

from weft.run.worker._run import run_rank as run_rank
from weft.run.worker._run import train_rank as train_rank
from weft.run.worker._run import training_of as training_of
from weft.run.worker._trial_teams import Team as Team
from weft.run.worker._trial_teams import teams_of as teams_of
