"""Checkpoints: verified, atomic, and free of layout, so that any plan loads what any plan saved."""

from weft.checkpoint._checkpointer import Checkpointer as Checkpointer
from weft.checkpoint._checkpointer import SaveError as SaveError
from weft.checkpoint._format import Json as Json
from weft.checkpoint._peers import Peers as Peers
from weft.checkpoint._pieces import module_pieces as module_pieces
from weft.checkpoint._read import StoredCheckpoint as StoredCheckpoint
