"""A loop that keeps its own forward, loss, backward and `optimizer.step()`.

`own_loop` takes what `session.prepare` was given without a loss.  `first_call` brings a model under its plan in its
first forward; `open_step` answers `backward`, `step` and `zero_grad` from then on.  `saves` is `session.save`.
"""
