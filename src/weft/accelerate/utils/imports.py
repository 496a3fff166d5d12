"""Functions such as `is_wandb_available`, which say whether a library is installed."""

from weft.accelerate.unsupported import name_of


def __getattr__(name: str) -> object:
    return name_of(__name__, name)
