"""The training step, the loop, evaluation, precision, optimizers and schedules."""

from weft.engine._loss_scale import LossScale as LossScale
from weft.engine._report import StepReporter as StepReporter
from weft.engine._setup import TrainingState as TrainingState
from weft.engine._setup import begin_training as begin_training
from weft.engine._setup import create_training as create_training
from weft.engine._signals import StopRequest as StopRequest
from weft.engine._step import Reduced as Reduced
from weft.engine._step import Stepper as Stepper
from weft.engine._throughput import ThroughputMeter as ThroughputMeter
from weft.engine._trainer import Trainer as Trainer
from weft.engine._trainer import TrainingData as TrainingData
from weft.engine._trainer import TrainingOutcome as TrainingOutcome
