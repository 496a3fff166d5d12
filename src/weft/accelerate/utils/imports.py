"""What is installed: `is_wandb_available` and its like."""

from weft.accelerate.unsupported import name_of


def __getattr__(name: str) -> object:
    return name_of(__name__, name)
