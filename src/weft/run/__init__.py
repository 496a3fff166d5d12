"""Runs a plan: data, engine, checkpoints, and the processes of the ranks."""
