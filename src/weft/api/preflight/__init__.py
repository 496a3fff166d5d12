"""What a few samples show of a model and its loss before training.

The samples run on copies (`trial_copies`, `sample_trials`), together and in parts.  `coupled_samples` finds samples
that depend on one another, `forward_state` finds state that a forward changes, `conditional_blocks` finds blocks that
not all samples run.  `proof` compares two steps under the plan with plain PyTorch.
"""
