"""The ledger of samples: what a run writes is replayed, and each way in which it may not be whole is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.errors import DataError
from weft.run.data.check_ledger import LedgerReport, check_ledger
from weft.run.data.ledger import SampleLedger, SampleOrder

ORDER = SampleOrder(seed=7, sizes=(50,), weights=(1.0,), global_batch_size=12, fingerprint="f")
LOADER = replace(ORDER, weights=(), loader="shuffled", pass_size=48)
"""That of a session's loader with drop_last: two of its fifty samples are left out of each pass."""
BLEND = SampleOrder(seed=7, sizes=(20, 9), weights=(0.5, 0.5), global_batch_size=12, fingerprint="f")


def run(
    folder: Path,
    generation: int,
    first: int,
    last: int,
    shares: Sequence[int] = (12,),
    *,
    order: SampleOrder = ORDER,
    killed: Sequence[int] = (),
    skips: int = 0,
    wrong: int = 0,
) -> None:
    """Steps `first + 1` to `last` by data ranks with these shares; those in `killed` lack the last step, `skips` is a
    step that is not finite, and in step `wrong` the first data rank reads other samples."""
    sampler = order.sampler()
    bounds = np.cumsum([0, *shares])
    for rank, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        ledger = SampleLedger(
            folder,
            order,
            generation=generation,
            data_index=rank,
            num_data_ranks=len(shares),
            start=start,
            stop=stop,
        )
        ledger.begin(first)
        for step in range(first + 1, last + 1):
            if rank in killed and step == last:
                break
            at = (step - 1) * order.global_batch_size
            ids = sampler.ids_at(np.arange(at + start, at + stop)) + (rank == 0 and step == wrong)
            microbatches = [{"sample_ids": torch.from_numpy(part)} for part in np.array_split(ids, 2)]
            ledger.add(step, microbatches, skipped=step == skips)
        ledger.sync()
        ledger.close()


def check(folder: Path, order: SampleOrder = ORDER) -> LedgerReport:
    return check_ledger(folder, seed=order.seed, global_batch_size=order.global_batch_size)


def test_restarts_other_shares_and_other_plans_are_one_history(tmp_path: Path) -> None:
    run(tmp_path, 1, 0, 7, (6, 6))
    run(tmp_path, 2, 4, 9, (6, 6), killed=[1])  # rank 1 was killed in step 9
    run(tmp_path, 4, 8, 11, (2, 2, 8), skips=10)  # generation 3 did not come to its first step
    run(tmp_path, 5, 11, 13, (12,))
    report = check(tmp_path)
    assert (report.num_steps, report.num_generations, report.num_skipped) == (13, 4, 1)
    assert report.num_repeated == 3 + 1  # steps 5 to 7, and the part of step 9
    # Steps cross the ends of epochs: 156 samples are three epochs of 50, and six of the next.
    assert [(epoch.epoch, epoch.num_samples) for epoch in report.epochs] == [(0, 50), (1, 50), (2, 50), (3, 6)]
    assert report.lines()[-1].startswith("whole     156 samples")
    assert "epochs    3 whole: each of 50 samples once" in report.lines()


def test_passes_of_a_loader_may_leave_samples_out(tmp_path: Path) -> None:
    run(tmp_path, 1, 0, 9, (4, 8), order=LOADER)
    report = check_ledger(tmp_path)
    assert [(epoch.epoch, epoch.num_samples, epoch.size) for epoch in report.epochs] == [
        (0, 48, 48),
        (1, 48, 48),
        (2, 12, 48),
    ]
    assert "epochs    2 whole: each of 48 samples once" in report.lines()
    order = LOADER.sampler()
    passes = [set((order.ids_at(np.arange(at, at + 48)) % 50).tolist()) for at in (0, 48)]
    assert all(len(one) == 48 for one in passes)
    assert passes[0] != passes[1]  # others are left out


def test_each_corpus_of_a_blend_has_epochs_of_its_own(tmp_path: Path) -> None:
    run(tmp_path, 1, 0, 10, (4, 8), order=BLEND)
    report = check(tmp_path, BLEND)
    counted = [(epoch.corpus, epoch.epoch, epoch.num_samples) for epoch in report.epochs]
    assert counted == [(0, 0, 20), (0, 1, 20), (0, 2, 20), *((1, epoch, 9) for epoch in range(6)), (1, 6, 6)]


def test_a_line_that_a_kill_cut_off_is_not_read_and_written_over(tmp_path: Path) -> None:
    run(tmp_path, 1, 0, 3, (6, 6))
    with (tmp_path / "ledger" / "data-00001.txt").open("a") as file:
        file.write("step 1 4 42 4")
    assert check(tmp_path).num_steps == 3
    run(tmp_path, 2, 3, 5, (6, 6))
    assert check(tmp_path).num_steps == 5


def change_line(folder: Path, rank: int, number: int, text: str | None) -> None:
    path = folder / "ledger" / f"data-{rank:05d}.txt"
    lines = path.read_text().splitlines()
    lines[number : number + 1] = [] if text is None else [text]
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("number", "text", "problem"),
    [
        (3, None, r"step 3 lacks positions 30 to 35 of the order \(a gap\)"),
        (3, "step 1 3 24 36 0", r"step 3 has positions 24 to 29 of the order twice \(a duplicate\)"),
        (3, "step 1 3 32 36 0", r"step 3 lacks positions 30 to 31 of the order \(a gap\)"),
        (3, "step 1 3 30 37 0", "step 3 has position 36 of the order, which is of step 4"),
        (3, "step 1 3 30 36 0", "step 3 had other samples on data rank 1 than positions 30 to 35"),
        (3, "steps 1 3", "data-00001.txt, line 4 is damaged"),
        (0, "begin 1 1 2", "data-00001.txt, line 1 is damaged"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, number: int, text: str | None, problem: str) -> None:
    run(tmp_path, 1, 0, 5, (6, 6))
    change_line(tmp_path, 1, number, text)
    with pytest.raises(DataError, match=f"the ledger is not whole: .*{problem}") as raised:
        check(tmp_path)
    assert raised.value.status == 1


def test_steps_that_no_ledger_has_are_a_gap(tmp_path: Path) -> None:
    run(tmp_path, 1, 0, 4)
    run(tmp_path, 2, 6, 8)
    with pytest.raises(DataError, match="goes on from step 6, but before it step 4 was the last.*steps 5 to 6 have"):
        check(tmp_path)


def test_samples_that_were_really_read_count(tmp_path: Path) -> None:
    run(tmp_path, 1, 0, 5, (6, 6), wrong=4)
    with pytest.raises(DataError, match="step 4 had other samples on data rank 0"):
        check(tmp_path)


def test_another_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no ledger. Before the run starts, set ledger = true"):
        check(tmp_path)
    run(tmp_path, 1, 0, 2)
    with pytest.raises(DataError, match="seed 7 .* but the recipe of the run says seed 8"):
        check_ledger(tmp_path, seed=8, global_batch_size=12)
    with pytest.raises(DataError, match="is of another order of samples"):
        run(tmp_path, 2, 2, 4, order=BLEND)
