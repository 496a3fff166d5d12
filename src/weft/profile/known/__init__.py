"""Well-known models by name, as data: no rank of a training needs them."""

from collections.abc import Mapping

from weft.profile.known._gpt import gpt_models
from weft.profile.known._llama import llama_models
from weft.profile.known._mixtures import mixture_models
from weft.profile.known._table import KnownModel as KnownModel
from weft.profile.known._table import find_known, joined

KNOWN_MODELS: Mapping[str, KnownModel] = joined(gpt_models(), llama_models(), mixture_models())
"""Well-known models by their public names in lower case: `llama-3.1-405b`, `deepseek-v3`, `gpt3-175b`."""


def known_model(name: str) -> KnownModel:
    """Look a model of `KNOWN_MODELS` up, whatever the case and with `_` or spaces for `-`.

    Raises:
        RecipeError: no model of that name; the message lists the closest one, or all.
    """
    return find_known(KNOWN_MODELS, name)
