"""Checkpoints that others wrote, converted to safetensors by a process that can do little else."""

from weft.run.checkpoint.foreign._convert import Converted as Converted
from weft.run.checkpoint.foreign._convert import ForeignWeights as ForeignWeights
from weft.run.checkpoint.foreign._convert import convert as convert
