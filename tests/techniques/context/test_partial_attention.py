"""Attention over parts of the keys, merged, is attention over all of them; so are its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.techniques.context import partial
from weft.techniques.context.kernels import Scoring, readable
from weft.techniques.context.partial import Partial, attend, attend_backward, merge
from weft.techniques.context.token_runs import most_tokens, runs_of, tokens_of


@given(length=st.integers(1, 200), ranks=st.integers(1, 9))
@settings(deadline=None)
def test_every_token_has_one_rank(length: int, ranks: int):
    runs = [run for index in range(ranks) for run in runs_of(length, ranks, index)]
    assert sorted(token for start, stop in runs for token in range(start, stop)) == list(range(length))
    shares = [tokens_of(length, ranks, index) for index in range(ranks)]
    assert max(shares) - min(shares) <= 2
    assert max(shares) == most_tokens(length, ranks)


@given(ranks=st.integers(1, 8), each=st.integers(1, 6))
@settings(deadline=None)
def test_causal_work_is_the_same_on_all_ranks(ranks: int, each: int):
    length = 2 * ranks * each
    work = [sum(sum(range(start + 1, stop + 1)) for start, stop in runs_of(length, ranks, i)) for i in range(ranks)]
    assert max(work) - min(work) == 0


def _drawn(queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries * 31 + keys)
    sizes = (2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8)
    query, key, value = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return query, key, value


MASKS = ("all", "causal", "some", "none of a row")


def _mask(kind: str, queries: int, keys: int) -> Tensor | None:
    if kind == "all":
        return None
    if kind == "causal":
        return torch.ones(queries, keys, dtype=torch.bool).tril()[None, None]
    mask = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[..., 0] = True
    if kind == "none of a row":
        mask[:, :, 1, : keys // 2] = False  # nothing in the first part of the keys
        mask[:, :, 1, -1] = True
    return mask


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("plainly", [False, True], ids=["kernel", "plainly"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_parts_merged_are_the_whole(kind: str, plainly: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(partial, "_CHUNK_SCORES", 40)  # several chunks of queries
    if plainly:
        monkeypatch.setattr(partial, "kernel_for", lambda *tensors, **how: None)
    queries, keys, cut = 7, 9, 4
    query, key, value = _drawn(queries, keys, dtype)
    mask, scale = _mask(kind, queries, keys), 0.3
    wide = [each.double().clone().requires_grad_() for each in (query, key, value)]
    wanted = F.scaled_dot_product_attention(*wide, attn_mask=mask, scale=scale, enable_gqa=True)
    gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)
    wanted.backward(gradient.double())

    parts = [slice(0, cut), slice(cut, keys)]
    masks = [None if mask is None else mask[..., part] for part in parts]
    merged: Partial | None = None
    for part, own in zip(parts, masks, strict=True):
        merged = merge(merged, attend(query, key[:, :, part], value[:, :, part], Scoring(scale, mask=own)))
    assert merged is not None
    whole = Partial(merged.output.to(dtype), merged.log_sum)
    found = [torch.zeros_like(each, dtype=torch.float64) for each in (query, key, value)]
    for part, own in zip(parts, masks, strict=True):
        shares = attend_backward(gradient, query, key[:, :, part], value[:, :, part], whole, Scoring(scale, mask=own))
        found[0] += shares[0]
        found[1][:, :, part], found[2][:, :, part] = shares[1].double(), shares[2].double()
    limit = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert _apart(wanted, whole.output) < limit
    for mine, theirs in zip(found, wide, strict=True):
        assert theirs.grad is not None
        assert _apart(theirs.grad, mine) < limit


def test_a_causal_part_is_what_a_mask_says():
    query, key, value = _drawn(5, 5, torch.float64)
    mask = _mask("causal", 5, 5)
    by_order, by_mask = Scoring(0.3, causal=True), Scoring(0.3, mask=mask)
    one, other = (attend(query, key, value, how) for how in (by_order, by_mask))
    torch.testing.assert_close(one.output, other.output)
    torch.testing.assert_close(one.log_sum, other.log_sum)
    gradient = torch.ones_like(one.output)
    first = attend_backward(gradient, query, key, value, one, by_order)
    second = attend_backward(gradient, query, key, value, one, by_mask)
    torch.testing.assert_close(first, second)


def test_who_has_seen_nothing_gives_nothing():
    query, key, value = _drawn(3, 4, torch.float64)
    nothing = torch.zeros(1, 1, 3, 4, dtype=torch.bool)
    part = attend(query, key, value, Scoring(0.3, mask=nothing))
    assert (part.log_sum == -torch.inf).all()
    assert not part.output.any()
    twice = merge(merge(None, part), part)
    assert not twice.output.any()
    assert (twice.log_sum == -torch.inf).all()
    seen = attend(query, key, value, Scoring(0.3))
    torch.testing.assert_close(merge(merge(None, part), seen).output, seen.output)


@pytest.mark.parametrize("made", ["narrow rows", "an odd start", "transposed", "expanded", "whole"])
def test_what_a_kernel_of_cuda_reads_has_its_rows_where_it_looks(made: str):
    wide = torch.randn(2, 3, 6, 17, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    given = {
        "narrow rows": wide[..., :16],
        "an odd start": wide[..., 1:],
        "transposed": wide[..., :16].transpose(1, 2),
        "expanded": wide[..., :1].expand(2, 3, 6, 16),
        "whole": wide[..., :16].contiguous(),
    }[made]
    (found,) = readable(given)
    assert torch.equal(found, given)
    assert found.stride(-1) == 1
    assert not any(stride * 2 % 16 for stride in found.stride()[:-1])
    assert (found is given) == (made == "whole")


def test_large_scores_of_bf16_are_not_rounded(monkeypatch: pytest.MonkeyPatch):
    """Scores near 50 are 0.25 apart in bf16, which would be a fifth of a probability."""
    monkeypatch.setattr(partial, "kernel_for", lambda *tensors, **how: None)
    query, key, value = (each * factor for each, factor in zip(_drawn(7, 9, torch.bfloat16), (16, 4, 1), strict=True))
    wide = [each.double().requires_grad_() for each in (query, key, value)]
    wanted = F.scaled_dot_product_attention(*wide, scale=0.3, enable_gqa=True)
    gradient = torch.ones_like(wanted).cumsum(2)
    wanted.backward(gradient)
    part = attend(query, key, value, Scoring(0.3))
    assert _apart(wanted, part.output) < 6e-3
    _, _, by_value = attend_backward(gradient.bfloat16(), query, key, value, part, Scoring(0.3))
    assert wide[2].grad is not None
    assert _apart(wide[2].grad, by_value) < 6e-3


def _apart(wanted: Tensor, found: Tensor) -> float:
    return float((wanted.detach() - found.double()).norm() / wanted.detach().norm())
