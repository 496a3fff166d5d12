"""What runs a plan: data, engine, checkpoints, and the processes of the ranks."""
