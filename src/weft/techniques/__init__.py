"""Techniques of splitting, keeping and sending: a folder each, with all that Weft knows of it.

`contract.py` in a folder has no torch: the settings, as a part of a section of the plan; in which terms the rest of
Weft speaks of them (properties of the settings, such as `shards_weights`, so that nobody else compares numbers and
words); what cannot be joined with them and why; what they cost; their words.  `runtime.py`, where there is one, is what
a rank does (`weft.techniques.runtime`).  It has torch, as most other files of a folder have; only ranks whose plan uses
the technique load it.

What is generic (the plan, search, prices, explanations, ejection, checks) asks `weft.techniques.registry.TECHNIQUES`,
and names none of them.
"""
