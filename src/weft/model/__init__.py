"""Models: blueprints, losses, families, reference models, and what is known of a model without building it."""
