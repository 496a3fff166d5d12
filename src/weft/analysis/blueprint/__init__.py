"""Builds the blueprint of a recipe's model: the module, and the tables by which it is split."""

from weft.analysis.blueprint._build import build_blueprint as build_blueprint
from weft.analysis.blueprint._build import look_for_blocks as look_for_blocks
