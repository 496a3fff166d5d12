"""What a prepared model, its weights and its gradients refuse between two steps.

`guards` holds the hooks of a model and its optimizer, `messages` what they say.  `edits` and `structure` see what the
loop writes into weights and modules; `copied_state` compares buffers over the ranks; `loss_parameters` reduces the
gradients of parameters that only a loss has.  `plain_model` leaves the model as the user gave it.
"""
