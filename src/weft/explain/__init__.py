"""Explain: why a plan is the best one, what it costs and what another would.  Importable without torch."""
