"""Verifies a plan: comparison with one process, dry runs, and the prediction of what ranks send."""
