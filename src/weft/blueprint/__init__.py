"""Blueprint: from a recipe to the model that trains, with a split table."""

from weft.blueprint._build import build_blueprint as build_blueprint
