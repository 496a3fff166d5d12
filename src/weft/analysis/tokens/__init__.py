"""Finds whether ranks may share the tokens of a sample."""
