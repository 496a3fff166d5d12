"""What a prepared model, its weights and its gradients refuse between two steps.

`model_guard` holds the hooks of a model and its optimizer, and what they say.  `edits` sees what the loop writes into
weights and modules, `gradients` what it does to gradients, also of parameters that only a loss has.  `state_checks`
compares modes and buffers over the ranks.  `plain_model` leaves the model as the user gave it.
"""
