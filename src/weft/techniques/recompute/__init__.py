"""Recomputation: activations that are thrown away after forward and computed again for backward."""
