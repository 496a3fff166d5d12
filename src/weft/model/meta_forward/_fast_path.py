"""torch's fused kernels for evaluating its transformer layers, which do not run without memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def without_fast_path() -> Generator[None]:
    """Let `nn.TransformerEncoder`, its layers and `nn.MultiheadAttention` compute in parts, in evaluation, too."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
