"""Reads configurations of Accelerate and DeepSpeed as a plan and settings of a recipe.  No torch."""

from weft.interop.migrate._keys import ForeignKey as ForeignKey
from weft.interop.migrate._keys import KeyOutcome as KeyOutcome
from weft.interop.migrate._keys import keys_of as keys_of
from weft.interop.migrate._migration import Migration as Migration
from weft.interop.migrate._read import read_config as read_config
from weft.interop.migrate._read import read_settings as read_settings
from weft.interop.migrate._read import read_table as read_table
