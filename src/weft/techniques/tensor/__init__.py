"""Tensor and sequence parallelism: ranks that share each matrix, and between matrices the sequence."""
