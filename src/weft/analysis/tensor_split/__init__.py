"""Proposes how a model's layers split over the tensor axis."""
