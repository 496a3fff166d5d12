"""Kernels of torch that attend and also return L, the log-sum-exp of each query's scores.

The CPU's takes any dtype, masks and fewer heads of keys than of queries.  On CUDA the flash kernel takes halves and no
mask, and the memory-efficient one fp32 and masks, but as many heads of keys as of queries.  What none of them takes is
computed in chunks (`partial.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, final

import torch
from torch import Tensor

_HALVES = (torch.bfloat16, torch.float16)
_AMPERE = (8, 0)
"""Compute capability from which on there is a flash kernel, and bf16 in any."""
_FLASH_SIZE = 256
"""Elements of a head that CUDA's flash kernel takes at most."""
_ALIGNED_BYTES = 16
"""CUDA's kernels read rows of heads and of masks that begin at multiples of it."""
_LOG_SUM_ROWS = 32
"""The memory-efficient kernel keeps L for a multiple of so many queries."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""The gradients of query, key and value."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """What becomes of the scores of some queries and keys, and which of them count."""

    scale: float
    causal: bool = False
    """Whether query i sees keys 0 to i alone."""
    mask: Tensor | None = None
    """Visible keys of each query, bool (samples or 1, 1, queries, keys); they go before `causal`."""
    softcap: float | None = None
    """See `ScoreMod`."""
    bias: Tensor | None = None
    """Addend of the scores, (1, heads, queries or 1, keys); None: nothing is added."""

    @property
    def is_plain(self) -> bool:
        """Whether kernels do it."""
        return self.softcap is None and self.bias is None

    def of_rows(self, rows: slice) -> Scoring:
        """Return the same for some of the queries."""
        mask, bias = (
            tensor if tensor is None or tensor.shape[2] == 1 else tensor[:, :, rows]
            for tensor in (self.mask, self.bias)
        )
        return replace(self, mask=mask, bias=bias)

    @property
    def by_kernel(self) -> bool:
        """Whether a kernel's own causal mask does it."""
        return self.causal and self.mask is None


class Kernel(Protocol):
    """How torch attends on a device.  Shapes are those of `partial.attend`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Return output and L.  Of queries that see no key both say anything."""
        ...

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        log_sum: Tensor,
        scoring: Scoring,
    ) -> Gradients:
        """Return the shares that these keys have in the gradients; `output` and `log_sum` are those over all keys."""
        ...


def kernel_for(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Kernel | None:
    """Return what torch has here for these, or None."""
    if query.shape[-1] != value.shape[-1]:
        return None
    if query.device.type == "cpu":
        return CpuFlash()
    if query.device.type != "cuda" or torch.version.hip is not None or not query.numel() or not key.numel():
        return None
    if query.shape[-1] * query.element_size() % _ALIGNED_BYTES:
        return None
    is_new = torch.cuda.get_device_capability(query.device) >= _AMPERE
    # With more keys than queries, the flash kernel's last query sees the last key, not its own.
    is_square = not scoring.causal or query.shape[2] == key.shape[2]
    has_flash = is_new and torch.backends.cuda.is_flash_attention_available()
    if has_flash and scoring.mask is None and query.dtype in _HALVES and query.shape[-1] <= _FLASH_SIZE and is_square:
        return CudaFlash()
    takes = (*_HALVES, torch.float32) if is_new else (torch.float16, torch.float32)
    return CudaEfficient() if query.dtype in takes and (scoring.mask is not None or is_square) else None


@final
class CpuFlash:
    """`_scaled_dot_product_flash_attention_for_cpu`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, scoring.by_kernel, attn_mask=_added(scoring.mask, query), scale=scoring.scale
        )

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        log_sum: Tensor,
        scoring: Scoring,
    ) -> Gradients:
        """See `Kernel`."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *inputs, output, log_sum, 0.0, scoring.by_kernel,
            attn_mask=_added(scoring.mask, inputs[0]), scale=scoring.scale,
        )  # fmt: skip


@final
class CudaFlash:
    """`_scaled_dot_product_flash_attention`, without a mask."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        assert scoring.mask is None, "the flash kernel takes no mask"
        results = torch.ops.aten._scaled_dot_product_flash_attention(
            *readable(query, key, value), 0.0, scoring.causal, return_debug_mask=False, scale=scoring.scale
        )
        return results[0], results[1]

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        log_sum: Tensor,
        scoring: Scoring,
    ) -> Gradients:
        """See `Kernel`."""
        query, key, _ = inputs
        # It reads L as if it were contiguous: of some rows of a whole, other numbers, without a word (torch 2.11).
        # Nothing is dropped, so nobody reads the state of a generator; all samples are as long as one another.
        seed, offset = (torch.empty(0, dtype=torch.int64, device=query.device) for _ in range(2))
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *readable(gradient, *inputs, output), log_sum.contiguous(), None, None,
            query.shape[2], key.shape[2], 0.0, scoring.causal, seed, offset, scale=scoring.scale,
        )  # fmt: skip


@final
class CudaEfficient:
    """`_scaled_dot_product_efficient_attention`: each head of keys is given once for every head of queries."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        groups = query.shape[1] // key.shape[1]
        (query,) = readable(query)
        results = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1),
            _aligned(scoring.mask, query, key), True, 0.0, scoring.by_kernel, scale=scoring.scale,
        )  # fmt: skip
        return results[0], results[1][:, :, : query.shape[2]]

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        log_sum: Tensor,
        scoring: Scoring,
    ) -> Gradients:
        """See `Kernel`."""
        query, key, value = inputs
        groups = query.shape[1] // key.shape[1]
        (query,) = readable(query)
        # In halves the kernel reads the output as it has written it itself: sample by sample, token by token.
        gradient, output = _by_token(gradient), _by_token(output)
        seed, offset = (torch.empty(0, dtype=torch.int64, device=query.device) for _ in range(2))
        by_query, by_key, by_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1),
            _aligned(scoring.mask, query, key), output, _in_full_rows(log_sum), seed, offset, 0.0,
            [True, True, True, False], scoring.by_kernel, scale=scoring.scale,
        )  # fmt: skip
        by_key, by_value = (
            gradient_part.unflatten(1, (-1, groups)).sum(2, dtype=torch.float32).to(key.dtype)
            for gradient_part in (by_key, by_value)
        )
        return by_query, by_key, by_value


def readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the same values where CUDA's kernels can read them: no gaps within a head, and every row begins at a
    multiple of `_ALIGNED_BYTES`."""

    def is_readable(tensor: Tensor) -> bool:
        starts = [tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1])]
        return tensor.stride(-1) == 1 and not any(start % _ALIGNED_BYTES for start in starts)

    return tuple(
        source if is_readable(source) else source.clone(memory_format=torch.contiguous_format) for source in tensors
    )


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as what is added to the scores."""
    if mask is None:
        return None
    return query.new_zeros(mask.shape).masked_fill_(~mask.to(query.device), -torch.inf)


def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The same for CUDA's kernels: for every head, its rows beginning where the kernel can read them."""
    if mask is None:
        return None
    row = -(-key.shape[2] * query.element_size() // _ALIGNED_BYTES) * _ALIGNED_BYTES // query.element_size()
    padded = query.new_zeros((*mask.shape[:-1], row))[..., : key.shape[2]]
    padded.masked_fill_(~mask.to(query.device), -torch.inf)
    return padded.expand(query.shape[0], query.shape[1], -1, -1)


def _by_token(tensor: Tensor) -> Tensor:
    """The same values, laid out as (samples, tokens, heads, size)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _in_full_rows(log_sum: Tensor) -> Tensor:
    """L with as many rows as the kernel itself writes: what is beyond the queries, or saw no key, is +∞, which makes
    its probabilities nothing."""
    rows = -(-log_sum.shape[-1] // _LOG_SUM_ROWS) * _LOG_SUM_ROWS
    padded = log_sum.new_full((*log_sum.shape[:-1], rows), torch.inf)
    padded[..., : log_sum.shape[-1]] = log_sum.masked_fill(log_sum == -torch.inf, torch.inf)
    return padded
