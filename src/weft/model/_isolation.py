"""Whether a model of transformers keeps documents apart that follow one another in a sample.

Weft's own masks do.  Of all other families transformers finds the borders, where the family's attention lets it: there
are those that mix tokens in other ways (state spaces, convolutions), build masks of their own, or count positions
themselves, and none of these says so.  So a small model of the same kind is tried: what it makes of a document behind
another one must be what it makes of it alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.config.recipe import hf_size
from weft.errors import RecipeError
from weft.formatting import format_percent
from weft.model.description import shrink_config
from weft.model.seeding import seeded

_FIRST, _SECOND = 7, 6
"""Tokens of the two documents."""
_BLOCKS = 4
"""Layers of the small model, at most: enough for several kinds of layers, of which families make patterns."""
_NOISE = 0.2
"""Added to all weights, so that nothing which begins at zero hides what it does; in units of a normal draw."""
_TOLERANCE = 1e-4
"""Share of the largest output: fp32 rounds to 1e-6, and a neighbour that is seen changes outputs by a tenth and more.
"""


def check_isolation(transformers: Any, path: str, config: Any) -> None:
    """Raise unless documents can be isolated in a causal language model of this configuration.

    Raises:
        RecipeError: they see one another, their positions go on, or no small model of the kind could be tried.
    """
    named = f'data.documents = "isolated" cannot be had with model.hf = "{path}"'
    fix = 'Use documents = "packed", or a sequence for each document'
    try:
        together, alone = _outputs(transformers, config)
    except Exception as problem:
        reason = (str(problem).strip().splitlines() or [""])[0]
        raise RecipeError(
            f"{named}: a small {config.model_type} with two documents in one sample does not run"
            f" ({type(problem).__name__}: {reason}). {fix}."
        ) from problem
    difference = float((together - alone).abs().max() / alone.abs().max())
    if not difference <= _TOLERANCE:
        raise RecipeError(
            f"{named}: a {config.model_type} does not keep documents apart. In a small one, outputs for a document"
            f" behind another differ from those for it alone by {format_percent(100 * difference)}. {fix}."
        )


@torch.no_grad()
def _outputs(transformers: Any, config: Any) -> tuple[Tensor, Tensor]:
    """Logits of the second document behind the first, and alone."""
    with seeded(0):
        model = _small_model(transformers, config).eval()
        for parameter in model.parameters():
            parameter.add_(_NOISE * torch.randn_like(parameter) / max(1, parameter.shape[-1]) ** 0.5)
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        tokens = torch.randint(1, vocabulary, (1, _FIRST + _SECOND))
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]
    together = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, _FIRST:]
    alone = model(input_ids=tokens[:, _FIRST:], position_ids=positions[:, _FIRST:], use_cache=False).logits
    return together, alone


def _small_model(transformers: Any, config: Any) -> Any:
    """A narrow model with few layers, its attention implemented as in the whole one."""
    whole = config.to_dict()
    small = type(config).from_dict(shrink_config(whole, min(hf_size(whole, "num_layers") or 1, _BLOCKS), 1, 1))
    small.use_cache = False
    implementation = config._attn_implementation
    return transformers.AutoModelForCausalLM.from_config(
        small, attn_implementation=implementation, dtype=torch.float32, trust_remote_code=False
    )
