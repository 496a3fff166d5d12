"""Checkpoints: verified, atomic, and free of layout, so that any plan loads what any plan saved."""

from weft.run.checkpoint._checkpointer import KEEP as KEEP
from weft.run.checkpoint._checkpointer import Checkpointer as Checkpointer
from weft.run.checkpoint._checkpointer import SaveError as SaveError
from weft.run.checkpoint._checkpointer import newest_saved_step as newest_saved_step
from weft.run.checkpoint._module_shards import module_shards as module_shards
from weft.run.checkpoint._peers import Peers as Peers
from weft.run.checkpoint._read import StoredCheckpoint as StoredCheckpoint
