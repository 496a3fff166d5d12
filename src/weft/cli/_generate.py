"""`weft generate`."""

from __future__ import annotations

import sys
from pathlib import Path


def generate(
    run: Path,
    /,
    *,
    prompt: str = "def ",
    tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> None:
    """Let a trained language model continue a text.

    The run may go on meanwhile. What was generated is kept in its folder, and shown on the page of its training.

    Parameters
    ----------
    run
        Folder of the run.
    prompt
        Text to continue.
    tokens
        How many tokens to add.
    temperature
        0 takes the likeliest token, 1 samples as the model was trained.
    top_k
        Sample among this many likeliest tokens only.
    top_p
        Sample among the likeliest tokens that together have this probability.
    seed
        The same seed gives the same text.
    """
    from weft.api import generate as continue_text
    from weft.events import RunFolder
    from weft.run.checkpoint import newest_saved_step
    from weft.watch.samples import keep_sample, samples_file

    folder = RunFolder.open(run)
    step = newest_saved_step(folder.checkpoints)
    text = continue_text(
        run, prompt, max_new_tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    print(text)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    try:
        keep_sample(samples_file(folder), {"step": step, "prompt": prompt, "text": text, **settings})
    except OSError as problem:
        print(f"note      {samples_file(folder)} was not written: {problem.strerror}", file=sys.stderr)
