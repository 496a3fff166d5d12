"""Attention over parts of the keys, by the kernels of a device: merged it is attention over all keys in fp64."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from gpu_parity import Verdict
from torch import Tensor

from weft.techniques.context.kernels import Scoring, kernel_for
from weft.techniques.context.partial import Partial, attend, attend_backward, merge, nothing_seen

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative, of a whole tensor: some units in the last place."""
HEADS = ((4, 4), (4, 2), (3, 1))
SIZES = (8, 64, 20)
"""Of a head; the last is no multiple of what kernels read at once."""
LENGTHS = ((33, 70), (64, 64), (1, 9))
"""Queries and keys."""
KINDS = ("all", "causal", "masked", "later", "later masked")
"""`later`: the second part of the keys is seen by the second half of the queries alone, as ranks of a ring see it."""


def attention_verdicts(device: str) -> Iterator[Verdict]:
    """Every kernel and none, through both passes, a verdict for each dtype and kind of mask with its worst case."""
    for dtype, kind in product(LIMITS, KINDS):
        worst, where, kernels = 0.0, "", set[str]()
        for case in product(HEADS, SIZES, LENGTHS):
            heads, size, lengths = case
            if kind == "causal" and lengths[0] != lengths[1]:
                continue
            apart, kernel = _apart(device, dtype, kind, heads, size, lengths)
            kernels.add(kernel)
            if not apart <= worst:  # nan is the worst
                worst, where = apart, f"heads {heads}, size {size}, lengths {lengths} by {kernel}"
        names = f"{str(dtype).removeprefix('torch.')}, {kind}, by {' and '.join(sorted(kernels))}"
        yield Verdict(f"attention of {names}", worst, LIMITS[dtype], where)


def attention_seconds(
    device: str, tokens: int = 8192, heads: int = 16, size: int = 128, rounds: int = 5
) -> dict[str, list[float]]:
    """Seconds of both passes over a causal sequence in bf16: torch's attention; the same in the two parts that a rank
    of two sees, its own keys and those before it; and these computed in chunks, as where no kernel returns L.

    All three attend from half the queries to as many keys as a rank has to: of torch's, half the time of a whole
    sequence counts.
    """
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, tokens, size, generator=generator).to(device, torch.bfloat16) for _ in range(3)]
    half = [each[:, :, : tokens // 2] for each in whole]
    unkernelled = [half[0], half[1], half[2][..., :-8]]  # values of another size than keys: no kernel takes them
    ways: dict[str, tuple[Callable[[], object], float]] = {
        "torch, half of the whole": (lambda: _by_torch(whole), 0.5),
        "two parts by kernels": (lambda: _by_parts(half), 1.0),
        "two parts in chunks": (lambda: _by_parts(unkernelled), 1.0),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (run, share) in ways.items():
            _wait(device)
            began = time.perf_counter()
            run()
            _wait(device)
            if turn:  # the first one loads libraries
                found[name].append((time.perf_counter() - began) * share)
    return found


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _by_torch(inputs: list[Tensor]) -> None:
    leaves = [each.detach().requires_grad_() for each in inputs]
    output = F.scaled_dot_product_attention(*leaves, is_causal=True)
    output.backward(torch.ones_like(output))


def _by_parts(inputs: list[Tensor]) -> None:
    """A rank's own keys, causally, and half of as many that all its queries see."""
    query, key, value = inputs
    scale, before = query.shape[-1] ** -0.5, slice(0, key.shape[2] // 2)
    parts = [(Scoring(scale, causal=True), key, value), (Scoring(scale), key[:, :, before], value[:, :, before])]
    merged: Partial | None = None
    for how, keys, values in parts:
        merged = merge(merged, attend(query, keys, values, how))
    assert merged is not None
    whole = Partial(merged.output.to(query.dtype), merged.log_sum)
    gradient = torch.ones_like(whole.output)
    for how, keys, values in parts:
        attend_backward(gradient, query, keys, values, whole, how)


def _apart(
    device: str, dtype: torch.dtype, kind: str, heads: tuple[int, int], size: int, lengths: tuple[int, int]
) -> tuple[float, str]:
    generator = torch.Generator().manual_seed(size * 1000 + lengths[0] * 10 + heads[1])
    shapes = (2, heads[0], lengths[0], size), (2, heads[1], lengths[1], size), (2, heads[1], lengths[1], size)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    gradient = torch.randn(shapes[0], generator=generator, dtype=torch.float64).to(dtype)
    mask = _mask(kind, lengths, generator)
    wanted = _whole(inputs, gradient, _seen(kind, mask, lengths), causal=kind == "causal")
    moved = [each.to(device) for each in (*inputs, gradient)]
    kernel = kernel_for(moved[0], moved[1], moved[2], Scoring(0.3, kind == "causal", mask))
    found = _in_parts(moved, mask, _pairs(kind, lengths), causal=kind == "causal")
    apart = [float((a - b.double().cpu()).norm() / a.norm()) for a, b in zip(wanted, found, strict=True)]
    # The greatest, where nan, which compares with nothing, is greater than all.
    return max(apart, key=lambda each: (each != each, each)), "no kernel" if kernel is None else type(kernel).__name__


def _mask(kind: str, lengths: tuple[int, int], generator: torch.Generator) -> Tensor | None:
    """Some keys, of which one query sees none in the first part."""
    if "masked" not in kind:
        return None
    mask = torch.rand(2, 1, *lengths, generator=generator) < 0.6
    mask[:, :, 0, : lengths[1] // 2] = "later" in kind  # else nothing of the first part
    mask[..., 0 if "later" in kind else -1] = True
    return mask


def _pairs(kind: str, lengths: tuple[int, int]) -> list[tuple[slice, slice]]:
    """Queries and keys that meet."""
    queries, keys = (slice(0, length) for length in lengths)
    if kind == "causal":
        return [(queries, keys)]
    first, second = slice(0, lengths[1] // 2), slice(lengths[1] // 2, lengths[1])
    return [(queries, first), (slice(lengths[0] // 2, lengths[0]) if "later" in kind else queries, second)]


def _seen(kind: str, mask: Tensor | None, lengths: tuple[int, int]) -> Tensor | None:
    """The whole of what queries see, as a mask."""
    if "later" not in kind:
        return mask
    seen = torch.ones(1, 1, *lengths, dtype=torch.bool) if mask is None else mask.clone()
    seen[..., : lengths[0] // 2, lengths[1] // 2 :] = False
    return seen


def _whole(inputs: list[Tensor], gradient: Tensor, mask: Tensor | None, *, causal: bool) -> list[Tensor]:
    wide = [each.double().clone().requires_grad_() for each in inputs]
    output = F.scaled_dot_product_attention(*wide, attn_mask=mask, is_causal=causal, scale=0.3, enable_gqa=True)
    output.backward(gradient.double())
    return [output.detach(), *(each.grad for each in wide if each.grad is not None)]


def _in_parts(of: list[Tensor], mask: Tensor | None, pairs: list[tuple[slice, slice]], *, causal: bool) -> list[Tensor]:
    """Output and gradients, of one pair of queries and keys after the other."""
    query, key, value, gradient = of
    every = slice(None), slice(None)
    seen = nothing_seen(query, value)
    for rows, columns in pairs:
        how = Scoring(0.3, causal=causal, mask=None if mask is None else mask[..., rows, columns])
        mine, theirs = (*every, rows), (*every, columns)
        part = attend(query[mine], key[theirs], value[theirs], how)
        merged = merge(Partial(seen.output[mine], seen.log_sum[mine]), part)
        seen.output[mine], seen.log_sum[mine] = merged.output, merged.log_sum
    output = seen.output.to(query.dtype)
    found = [torch.zeros_like(each, dtype=torch.float64) for each in (query, key, value)]
    for rows, columns in pairs:
        how = Scoring(0.3, causal=causal, mask=None if mask is None else mask[..., rows, columns])
        mine, theirs = (*every, rows), (*every, columns)
        whole = Partial(output[mine], seen.log_sum[mine])
        shares = attend_backward(gradient[mine], query[mine], key[theirs], value[theirs], whole, how)
        for total, at, share in zip(found, (mine, theirs, theirs), shares, strict=True):
            total[at] += share
    return [output, *found]
