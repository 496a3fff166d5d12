"""Offloading: what waits in host memory, and comes back when it is needed."""
