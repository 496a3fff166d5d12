"""From recipe and cluster to a plan: prices, search and explanations."""
