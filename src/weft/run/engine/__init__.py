"""The training step, the loop, evaluation, precision, optimizers and schedules."""

from weft.run.engine._loss_scale import LossScale as LossScale
from weft.run.engine._report import StepReporter as StepReporter
from weft.run.engine._setup import TrainingState as TrainingState
from weft.run.engine._setup import begin_training as begin_training
from weft.run.engine._setup import create_training as create_training
from weft.run.engine._signals import StopRequest as StopRequest
from weft.run.engine._step import ReducedGradients as ReducedGradients
from weft.run.engine._step import Stepper as Stepper
from weft.run.engine._throughput import ThroughputMeter as ThroughputMeter
from weft.run.engine._trainer import Trainer as Trainer
from weft.run.engine._trainer import TrainingData as TrainingData
from weft.run.engine._trainer import TrainingResult as TrainingResult
