"""Search: the layouts of a model on a cluster, priced and ranked.  Importable without torch."""
