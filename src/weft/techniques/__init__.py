"""Techniques of splitting, keeping and sending: a folder each, with all that Weft knows of it.

Two files of a folder have no torch.  `settings.py` stands below the plan: the settings, as a part of a section of the
plan, with the terms in which the rest of Weft speaks of them (properties such as `shards_weights`, so that nobody else
compares numbers and words).  `contract.py` stands above the plan: what cannot be joined with the settings and why, what
they keep, their words.  `runtime.py`, where there is one, is what a rank does (`weft.techniques.runtime`).  It has
torch, as most other files of a folder have; only ranks whose plan uses the technique load it.

What is generic (search, prices, explanations, ejection, checks) asks `weft.techniques.registry.TECHNIQUES`, and names
none of them.
"""
