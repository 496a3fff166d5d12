"""Well-known models by name, as data: no rank of a training needs them."""

from weft.errors import RecipeError, did_you_mean
from weft.model.profile.known._models import KNOWN_MODELS as KNOWN_MODELS
from weft.model.profile.known._table import KnownModel as KnownModel


def known_model(name: str) -> KnownModel:
    """Look a model of `KNOWN_MODELS` up, whatever the case and with `_` or spaces for `-`.

    Raises:
        RecipeError: no model of that name; the message lists the closest one, or all.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key in KNOWN_MODELS:
        return KNOWN_MODELS[key]
    hint = did_you_mean(key, KNOWN_MODELS) or f" The known ones are: {', '.join(KNOWN_MODELS)}."
    raise RecipeError(f'model "{name}" is not one that Weft knows by name.{hint}')
