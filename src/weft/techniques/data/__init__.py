"""Data parallelism: ranks that see different samples, and microbatches that follow one another."""
