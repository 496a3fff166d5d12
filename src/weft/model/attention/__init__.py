"""Attention of models: masks, biases and dropout of its scores."""
