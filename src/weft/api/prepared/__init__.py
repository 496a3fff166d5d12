"""A model and its optimizer under a plan: what `session.prepare` makes.

`models` brings a model under its plan.  `prepared_model` is what both kinds of loop have: saves, exports, agreement.
`state` is the `TrainState` of a loop whose steps are Weft's; `manual_step` a step whose backwards the loop writes.
"""
