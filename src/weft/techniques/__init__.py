"""Techniques of splitting, keeping and sending: a folder each, with all that Weft knows of it.

`contract.py` in a folder has no torch: the settings, as a part of a section of the plan; in which terms the rest of
Weft speaks of them (properties of the settings, such as `shards_weights`, so that nobody else compares numbers and
words); what cannot be joined with them and why; what they cost; their words.  The other files of a folder are the
technique as it runs, most of them with torch.

What is generic (the plan, search, prices, explanations, ejection, checks) asks `weft.techniques.registry.TECHNIQUES`,
and names none of them.
"""
