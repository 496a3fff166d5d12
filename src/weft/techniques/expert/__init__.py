"""Expert parallelism: ranks that share out the experts of a mixture."""
