"""Adapters of the package `peft` in a model: only they are trained."""

from weft.model.adapters._apply import apply_adapter as apply_adapter
from weft.model.adapters._splits import unsplit_layers_note as unsplit_layers_note
