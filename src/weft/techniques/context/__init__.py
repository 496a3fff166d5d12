"""Context parallelism: ranks that share one long sequence."""
