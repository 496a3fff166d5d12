"""Measurements behind Weft's figures.  `python -m benchmarks` runs all; each module also runs alone."""
