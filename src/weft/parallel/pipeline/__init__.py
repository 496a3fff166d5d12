"""Pipeline parallelism: stages cut by substitution, six schedules, and the runtime that executes them.

The orders of actions come from `weft.plan`; the runtime is Weft's own, not that of `torch.distributed.pipelining`.  As
read in 2.13, that one fixes the number and the shapes of microbatches with the first step, exchanges pickled metadata
unless every stage is described by hand, allocates the receive buffers of all microbatches at once, computes the weight
gradients of a split backward past the hooks of the parameters (see `weight_pass`), and a subclass of its stage would
have to lean on private parts that change between minors.  What Weft needs beside the orders is small: `routes` (which
messages, in which order), `transport` (sends and receives), `stage` (forward and backward of one microbatch),
`weight_pass` (the second half of a split backward) and `runner`.
"""

from weft.parallel.pipeline.cut import Absent as Absent
from weft.parallel.pipeline.cut import Passed as Passed
from weft.parallel.pipeline.cut import Received as Received
from weft.parallel.pipeline.cut import choose_cuts as choose_cuts
from weft.parallel.pipeline.cut import cut_stage as cut_stage
from weft.parallel.pipeline.cut import stage_of as stage_of
from weft.parallel.pipeline.parts import cut_parts as cut_parts
from weft.parallel.pipeline.runner import PipelineRunner as PipelineRunner
from weft.parallel.pipeline.ties import Tie as Tie
from weft.parallel.pipeline.ties import find_ties as find_ties
from weft.parallel.pipeline.ties import share_parameters as share_parameters
from weft.parallel.pipeline.weight_pass import WeightPass as WeightPass
from weft.parallel.pipeline.weight_pass import deferring as deferring
