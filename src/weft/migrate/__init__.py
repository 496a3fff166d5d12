"""Migrate: configurations and scripts of other systems as those of Weft.  Importable without torch."""

from weft.migrate._accelerate_keys import KEYS as ACCELERATE_KEYS
from weft.migrate._deepspeed_keys import KEYS as DEEPSPEED_KEYS
from weft.migrate._keys import Key as Key
from weft.migrate._keys import Outcome as Outcome
from weft.migrate._migration import Migration as Migration
from weft.migrate._read import read_config as read_config

__all__ = ["ACCELERATE_KEYS", "DEEPSPEED_KEYS", "Key", "Migration", "Outcome", "read_config"]
