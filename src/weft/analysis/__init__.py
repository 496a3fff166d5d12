"""Looks at any model, without memory: its profile from one forward, and how it may be split, cut and shared."""
