"""The nouns that a user writes, as data: recipe, cluster and plan."""
