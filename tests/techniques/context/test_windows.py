"""Attention through a window: who sees whom among ranks, what they show one another, and what a model is known by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threaded_ranks import attend_whole
from torch import nn

from weft.comm.mesh import GroupView
from weft.model.attention.call import MaskPattern, ScoreMod, attend
from weft.techniques.context.form import AttentionForm
from weft.techniques.context.token_runs import Shown, runs_of
from weft.techniques.context.visibility import Visibility
from weft.techniques.core.local_tokens import LocalTokens

SCALE = 0.4


@given(length=st.integers(2, 90), ranks=st.integers(1, 5), window=st.integers(1, 90))
@settings(deadline=None)
def test_every_pair_is_computed_once_and_only_what_is_seen(length: int, ranks: int, window: int) -> None:
    """Also: no query of a pair sees none of its keys, and what ranks show is all that others need."""
    visited = torch.zeros(length, length, dtype=torch.int64)
    for index in range(ranks):
        tokens = LocalTokens(length=length, runs=runs_of(length, ranks, index))
        view = GroupView(tuple(range(ranks)), index, None)
        who = Visibility(tokens, view, AttentionForm(pattern=MaskPattern(causal=True, window=window), scale=1.0))
        for source in range(ranks):
            shown = who.shown.every(source) if source == index else who.shown.of(source)
            queries, keys = (torch.cat([torch.arange(*run) for run in runs]) for runs in (tokens.runs, shown))
            for pair in who.pairs(source):
                mine, theirs = queries[pair.queries], keys[pair.keys]
                mask = who.scoring(source, pair, (0, 1)).mask
                if mask is not None:
                    seen = mask[0, 0]
                elif pair.causal:
                    seen = torch.ones(len(mine), len(theirs), dtype=torch.bool).tril()
                else:
                    seen = torch.ones(len(mine), len(theirs), dtype=torch.bool)
                assert seen.any(1).all()
                visited[mine[:, None], theirs] += seen
    behind = torch.arange(length)[:, None] - torch.arange(length)
    assert torch.equal(visited, ((behind >= 0) & (behind < window)).long())


def test_a_long_run_computes_little_more_than_it_sees() -> None:
    length, window = 16_384, 1024
    form = AttentionForm(pattern=MaskPattern(causal=True, window=window), scale=1.0)
    who = Visibility(LocalTokens(length=length, runs=runs_of(length, 1, 0)), GroupView((0,), 0, None), form)
    computed = sum(
        (pair.queries.stop - pair.queries.start) * (pair.keys.stop - pair.keys.start) for pair in who.pairs(0)
    )
    assert computed < 1.3 * length * window


def test_ranks_show_what_a_later_run_sees() -> None:
    assert Shown(40, 2, 4).of(0) == ((7, 10), (37, 40))
    assert Shown(40, 2, 4).places(0) == ((7, 10), (17, 20))
    assert Shown(40, 2, 64).of(1) == runs_of(40, 2, 1)
    assert Shown(40, 2, 1).most == 0


@pytest.mark.parametrize("dropout", [None, nn.Identity()], ids=["kernel", "written"])
@pytest.mark.parametrize("queries", [9, 1], ids=["all", "the last"])
@pytest.mark.parametrize("window", [1, 4, 20])
def test_one_process_sees_the_window(window: int, queries: int, dropout: Any) -> None:
    draw = torch.Generator().manual_seed(3)
    operands = [torch.randn(2, heads, 9, 4, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)]
    wanted = attend_whole(operands, SCALE, window)[:, :, 9 - queries :]
    query = operands[0][:, :, 9 - queries :]
    pattern = MaskPattern(causal=True, window=window)
    found = attend(query, operands[1], operands[2], pattern, ScoreMod(scale=SCALE), dropout=dropout)
    torch.testing.assert_close(found, wanted)
