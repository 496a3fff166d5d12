"""What a user writes: recipe, cluster and plan, as data."""
