"""Planning finds a plan for a recipe on a cluster: prices, search and explanations."""
