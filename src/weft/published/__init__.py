"""Published: what others measured, and how far the planner is from it.  Importable without torch."""
