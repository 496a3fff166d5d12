"""`weft.train`, `weft.check` and `weft.generate`: whole runs from a recipe, in fresh processes.

`time_trials` lets a few steps decide between plans, `memory_fit` decides the microbatch by a step on the real device.
"""
