"""What holds a plan to its word: comparison with one process, dry runs, predicted sends."""
