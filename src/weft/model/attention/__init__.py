"""Attention of models: the one call, the implementations for `transformers`, and places of tokens."""
