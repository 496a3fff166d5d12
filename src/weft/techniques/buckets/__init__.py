"""Gradient buckets: what data ranks reduce together, and by which algorithm."""
