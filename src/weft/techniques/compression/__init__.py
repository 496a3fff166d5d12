"""Lossy compression of gradients on the wire, with the recipe's permission only."""
