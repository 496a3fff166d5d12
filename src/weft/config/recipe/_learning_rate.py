"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from weft.config.recipe._recipe import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of step `step`, counted from 0.

    Warm-up rises linearly and reaches the peak in its last step; its first step is already above zero.  From there
    `linear` and `cosine` fall to exactly `final_learning_rate_ratio` times the peak in the run's last step, and
    `warmup_stable_decay` stays at the peak and falls linearly over the last `decay_steps`.  Steps beyond the run
    keep the last value.
    """
    optimizer = recipe.optimizer
    peak = peak_learning_rate(recipe)
    warmup = optimizer.warmup_steps
    if step < warmup:
        return peak * ((step + 1) / warmup)
    decayed = min(_decayed(recipe, step), 1.0)
    if optimizer.falls_along_cosine:
        decayed = (1.0 - math.cos(math.pi * decayed)) / 2.0
    return peak * ((1.0 - decayed) + decayed * optimizer.final_learning_rate_ratio)


def peak_learning_rate(recipe: Recipe) -> float:
    """Return the recipe's learning rate after its large-batch rule.

    `linear` follows Goyal et al., 2017 ("Accurate, Large Minibatch SGD"): k times the batch, k times the rate.
    `square_root` keeps the variance of the update instead, which suits adaptive optimizers (Krizhevsky, 2014; LAMB).
    """
    optimizer, batch = recipe.optimizer, recipe.batch.global_batch_size
    if optimizer.batch_scaling == "none":
        return optimizer.learning_rate
    assert optimizer.base_batch_size is not None, "the recipe asks for it"
    ratio = batch / optimizer.base_batch_size
    return optimizer.learning_rate * (ratio if optimizer.batch_scaling == "linear" else math.sqrt(ratio))


def decay_start(recipe: Recipe) -> int | None:
    """Return the step, counted from 0, from which the learning rate falls; None: it never does."""
    optimizer, last = recipe.optimizer, recipe.run.steps - 1
    start = max(optimizer.warmup_steps - 1, 0)
    if optimizer.schedule == "constant":
        return None
    if optimizer.schedule == "warmup_stable_decay":
        length = optimizer.decay_steps if optimizer.decay_steps is not None else max(recipe.run.steps // 5, 1)
        start = max(last - length, start)
    return start if last > start else None


def _decayed(recipe: Recipe, step: int) -> float:
    """Share of the decay that is done at `step`: 0 at the peak, 1 in the last step."""
    start, last = decay_start(recipe), recipe.run.steps - 1
    return 0.0 if start is None else max(step - start, 0) / (last - start)
