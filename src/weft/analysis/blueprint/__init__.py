"""Blueprint: from a recipe to the model that trains, with a split table."""

from weft.analysis.blueprint._build import build_blueprint as build_blueprint
from weft.analysis.blueprint._build import look_for_blocks as look_for_blocks
