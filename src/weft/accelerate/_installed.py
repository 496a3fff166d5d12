"""Functions that say which libraries are installed."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch

_LIBRARIES = (
    *("aim", "clearml", "comet_ml", "datasets", "deepspeed", "dvclive", "matplotlib", "mlflow", "pandas", "peft"),
    *(
        "pytest",
        "rich",
        "schedulefree",
        "swanlab",
        "tensorboard",
        "timm",
        "torchao",
        "torchdata",
        "torchvision",
        "trackio",
    ),
    *("transformers", "triton", "wandb"),
)
_OTHERS = (
    *("4bit_bnb", "8bit_bnb", "bnb", "fp8", "habana_gaudi1", "hpu", "lomo", "megatron_lm", "mlu", "mps", "msamp"),
    *("musa", "neuron", "npu", "pippy", "sagemaker", "sdaa", "torch_xla", "transformer_engine", "xccl", "xpu"),
)
"""Libraries and devices that Weft does not run on or with, installed or not."""


def is_installed(library: str, *_: Any, **__: Any) -> bool:
    """Whether a library can be imported."""
    return library not in _OTHERS and importlib.util.find_spec(library) is not None


def asking_for(name: str) -> Callable[..., bool] | None:
    """Return the function of a name such as `is_wandb_available`, None where it asks for nothing that is known."""
    match = re.fullmatch(r"is_(\w+)_available", name)
    if match and match[1] in ("cuda", "fp16"):
        return torch.cuda.is_available
    if match and match[1] == "bf16":
        return functools.partial(is_installed, "torch")
    return functools.partial(is_installed, match[1]) if match and match[1] in (*_LIBRARIES, *_OTHERS) else None
