"""Load after save is the identity, whatever the two layouts."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Cut, ThreadRanks, one_shard, shards_of
from pool import RankPool
from safetensors.torch import load_file
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.errors import CheckpointError
from weft.run.checkpoint import Checkpointer, Peers
from weft.techniques.core import CheckpointShard

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    made = list[Tensor]()
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.sampled_from([(), (1,), (12, 6), (6, 4, 2), (24,), (0, 3)]))
        generator = torch.Generator().manual_seed(number)
        tensor = torch.randint(-100, 100, shape, generator=generator)
        made.append(tensor.to(draw(st.sampled_from(DTYPES))))
    return made


@st.composite
def cuts(draw: st.DrawFn, tensor: Tensor) -> Cut:
    splits = [
        (dim, parts, blocks)
        for dim, size in enumerate(tensor.shape)
        for parts in (2, 3)
        for blocks in (1, 2, 3)
        if size and size % (parts * blocks) == 0
    ]
    dim, parts, blocks = draw(st.sampled_from([(0, 1, 1), *splits]))
    bounds = tuple(sorted(draw(st.lists(st.floats(0, 1), max_size=2))))
    return Cut(dim=dim, parts=parts, blocks=blocks, bounds=bounds, replicas=draw(st.integers(1, 2)))


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[list[Tensor], list[Cut], list[Cut], int]:
    made = draw(tensors())
    file_bytes = draw(st.sampled_from([16, 100, 1 << 20]))
    return made, [draw(cuts(one)) for one in made], [draw(cuts(one)) for one in made], file_bytes


@settings(max_examples=60, deadline=None)
@given(two_layouts())
def test_load_under_another_layout_restores_every_bit(case: tuple[list[Tensor], list[Cut], list[Cut], int]) -> None:
    made, before, after, file_bytes = case

    def spread(layout: list[Cut], rank: int, *, filled: bool) -> list[CheckpointShard]:
        named = zip(range(len(made)), made, layout, strict=True)
        return [shard for at, one, cut in named for shard in shards_of(f"model/{at}", one, cut, rank, filled=filled)]

    with tempfile.TemporaryDirectory() as folder:

        def save(peers: Peers) -> Path:
            checkpointer = Checkpointer(Path(folder), peers, file_bytes=file_bytes)
            return checkpointer.save(7, spread(before, peers.rank, filled=True), {"cursor": peers.rank})

        def load(peers: Peers) -> tuple[object, list[CheckpointShard]]:
            shards = spread(after, peers.rank, filled=False)
            return Checkpointer(Path(folder), peers).load("latest", shards), shards

        ThreadRanks().run(max(cut.world for cut in before), save)
        results = ThreadRanks().run(max(cut.world for cut in after), load)
        for rank, (state, shards) in enumerate(results):
            assert state == {"cursor": 0}
            for shard, expected in zip(shards, spread(after, rank, filled=True), strict=True):
                assert torch.equal(shard.tensor, expected.tensor)


def save_and_load_among_ranks(folder: str, view: GroupView, world: int) -> list[float]:
    whole = torch.arange(48.0).view(8, 6)
    peers = Peers.of_group(view)
    checkpointer = Checkpointer(Path(folder), peers)
    checkpointer.save(1, shards_of("model/w", whole, Cut(parts=world), peers.rank, filled=True))
    loaded = shards_of("model/w", whole, Cut(dim=1, parts=2, bounds=(0.3,)), peers.rank, filled=False)
    checkpointer.load("latest", loaded)
    return [value for shard in loaded for value in shard.tensor.tolist()]


def job_on_the_world(folder: str) -> list[float]:
    import torch.distributed as dist

    world = dist.get_world_size()
    return save_and_load_among_ranks(folder, GroupView(tuple(range(world)), dist.get_rank(), dist.group.WORLD), world)


def job_with_a_failing_rank(folder: str) -> str:
    import torch.distributed as dist

    view = GroupView((0, 1), dist.get_rank(), dist.group.WORLD)
    peers = Peers.of_group(view)
    broken = torch.zeros(2, dtype=torch.complex64 if peers.rank == 1 else torch.float32)
    shard = CheckpointShard(name=f"model/{peers.rank}", shape=broken.shape, tensor=broken)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(Path(folder), peers).save(1, [shard])
    return str(caught.value)


def test_real_ranks_agree(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(4, job_on_the_world, str(tmp_path))
    whole = torch.arange(48.0).view(8, 6)
    expected = [shards_of("model/w", whole, Cut(dim=1, parts=2, bounds=(0.3,)), rank, filled=True) for rank in range(4)]
    assert results == [[value for shard in shards for value in shard.tensor.tolist()] for shards in expected]


def test_a_problem_on_one_rank_is_raised_on_all_with_one_text(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, job_with_a_failing_rank, str(tmp_path))
    assert first == second
    assert "rank 1: model/1 has dtype torch.complex64, which a checkpoint cannot hold" in first
    assert not list(tmp_path.iterdir())


def test_a_whole_tensor_is_stored_under_its_name_and_shape(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save(1, [one_shard("model/w", torch.arange(6.0).view(2, 3))])
    stored = load_file(path / "rank-00000-0000.safetensors")
    assert torch.equal(stored["model/w"], torch.arange(6.0).view(2, 3))


def test_precision_is_changed_with_a_word_and_masters_never_lose_any(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, [one_shard("model/w", torch.tensor([1.5, 2.5]))])
    for dtype in (torch.float64, torch.bfloat16):
        target = one_shard("model/w", torch.zeros(2, dtype=dtype))
        with caplog.at_level(logging.WARNING):
            checkpointer.load("latest", [target])
        assert target.tensor.tolist() == [1.5, 2.5]
        assert "1 tensors change precision while loading (model/w)" in caplog.text
        caplog.clear()
    checkpointer.save(2, [one_shard("model/w", torch.tensor([1.5, 2.5], dtype=torch.float64))])
    narrow = one_shard("model/w", torch.zeros(2))
    with pytest.raises(CheckpointError, match="w is float64 there and float32 here.*the precision that saved it"):
        checkpointer.load("latest", [narrow])
    assert narrow.tensor.tolist() == [0.0, 0.0]


def test_names_and_shapes_must_fit_before_anything_changes(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, [one_shard("model/a.weight", torch.ones(2)), one_shard("model/b", torch.ones(3))])
    target = one_shard("model/a.weight", torch.zeros(2))
    with pytest.raises(
        CheckpointError, match=r"lacks 1 of the 2 tensors wanted: model/a.wieght. Did you mean model/a.w"
    ):
        checkpointer.load("latest", [one_shard("model/a.wieght", torch.ones(2)), one_shard("model/b", torch.zeros(3))])
    with pytest.raises(CheckpointError, match=r"has 1 tensors that the model has not: model/b. Load it with"):
        checkpointer.load("latest", [target])
    with pytest.raises(CheckpointError, match=r"1 shapes differ: model/b is \[3\] there and \[4\] here"):
        checkpointer.load("latest", [target, one_shard("model/b", torch.zeros(4))])
    assert target.tensor.tolist() == [0.0, 0.0]


def test_elements_that_count_nowhere_or_twice_are_refused_at_the_save(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    half = CheckpointShard(name="model/w", shape=whole.shape, tensor=whole[:2])
    with pytest.raises(CheckpointError, match="model/w lacks 2 elements") as caught:
        Checkpointer(tmp_path).save(1, [half])
    assert not caught.value.training_can_continue
    with pytest.raises(CheckpointError, match="model/w is written twice .part 0 of 1, element 0"):
        Checkpointer(tmp_path).save(1, [half, one_shard("model/w", whole)])
    assert not list(tmp_path.iterdir())


def test_state_that_is_no_json_is_a_defect_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="ValueError: Out of range float") as caught:
        Checkpointer(tmp_path).save(1, [one_shard("model/w", torch.ones(1))], {"loss": float("nan")})
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.status == 1  # no input that a user could mend: ranks may start again
