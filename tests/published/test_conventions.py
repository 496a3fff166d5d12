"""What sources leave unsaid: devices, models, layouts, years, and the meaning of their figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.published import PUBLISHED_RUNS, Row, read_rows, validate
from benchmarks.published._cases import Case, Forecast, cases_of
from benchmarks.published._devices import largest_divisor, named_cluster, parse_device_name
from benchmarks.published._measure import measured_step, step_flops
from benchmarks.published._sources import history_of, year_of
from published_examples import LLAMA, shipped, write

from weft.config.cluster import parse_cluster_spec
from weft.errors import PlanError
from weft.planning.price import model_flops
from weft.planning.search import plan_of


def read(tmp_path: Path, **changes: str) -> Row:
    (row,) = read_rows(write(tmp_path / "runs.csv", [{**LLAMA, **changes}]))
    return row


def case(tmp_path: Path, **changes: str) -> Case:
    (found,) = cases_of([read(tmp_path, **changes).run])
    assert isinstance(found, Case), found
    return found


def refusal(tmp_path: Path, **changes: str) -> str:
    (found,) = cases_of([read(tmp_path, **changes).run])
    assert isinstance(found, Forecast)
    return found.refused or ""


@pytest.mark.parametrize(
    ("label", "kind", "gigabytes"),
    [
        ("A100-80GB-SXM", "a100", 80),
        ("A100-SXM4-40GB", "a100-40gb", 40),
        ("NVIDIA H100 80GB HBM3", "h100", 80),
        ("H100 PCIe", "h100-pcie", None),
        ("H200-141GB-SXM", "h200", 141),
        ("GB200-NVL72", "gb200", None),
        ("MI300X-192GB", "mi300x", 192),
        ("TPU v4", "tpu-v4", None),
        ("TPUv5p", "tpu-v5p", None),
        ("V100-16GB-SXM (p3.16xlarge)", "v100-16gb", 16),
        ("abacus", None, None),
    ],
)
def test_device_names(label: str, kind: str | None, gigabytes: float | None) -> None:
    found = parse_device_name(label)
    assert (found.kind if found else None, found.memory_gigabytes if found else None) == (kind, gigabytes)


def test_what_a_device_name_says_beside_its_kind(tmp_path: Path) -> None:
    found = case(tmp_path, gpu="H100-96GB-HBM2e (500W, 2.4TB/s)", inter_bw_Gbps="1600", intra_bw_GBps="400")
    (node,) = found.cluster.nodes
    assert node.devices.memory_bandwidth_bytes_per_second == 2.4e12
    assert node.devices.memory_bytes == int(96 * 2**30 * 0.99)
    inside, between = found.cluster.links
    assert (inside.bandwidth_bytes_per_second, between.bandwidth_bytes_per_second) == (400e9, 25e9)


def test_domains_are_shared_out_evenly() -> None:
    assert largest_divisor(128, 72) == 64
    assert largest_divisor(144, 72) == 72
    assert largest_divisor(4, 8) == 4


def test_every_model_of_the_shipped_runs_has_the_parameters_that_its_source_counts() -> None:
    rows = read_rows(PUBLISHED_RUNS)
    cases = cases_of([row.run for row in rows])
    for row, found in zip(rows, cases, strict=True):
        stated = row.run.parameters_billion
        if isinstance(found, Case) and stated and not found.is_single_layer:
            # Long sequences have tables of positions; Hagemann's 128k vocabulary is counted as the original's.
            near = 0.17 if row.run.family in ("llm-foundry", "hagemann") else 0.09
            assert found.profile.num_parameters == pytest.approx(stated * 1e9, rel=near), (row.run.index, row.run.model)


def test_layout(tmp_path: Path) -> None:
    (layout,) = case(tmp_path).layouts
    assert (layout.pipeline, layout.data, layout.tensor, layout.microbatches) == (2, 4, 2, 16)
    assert (layout.zero, layout.schedule, layout.cuts, layout.sequence_parallel) == (1, "1f1b", (16,), True)
    (layout,) = case(tmp_path, vpp="4", dp="", zero_stage="").layouts
    assert (layout.data, layout.schedule, layout.chunks) == (4, "interleaved_1f1b", 4)
    (layout,) = case(tmp_path, zero_stage="3", pp="1", dp="8").layouts
    assert (layout.shard, layout.replicate, layout.cuts) == (8, 1, None)


def test_what_is_not_said_is_left_open(tmp_path: Path) -> None:
    layouts = case(tmp_path, micro_batch="", recompute="").layouts
    assert {layout.microbatch_size for layout in layouts} == {1, 2, 4, 8, 16}
    recomputed = {
        layout.recompute if isinstance(layout.recompute, str) else layout.recompute.count("full") / 32
        for layout in layouts
    }
    assert recomputed == {"none", 0.25, 0.5, 0.75, "full"}
    assert all(layout.microbatch_size * layout.microbatches == 16 for layout in layouts)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "abacus"}, 'gpu = "abacus" is not in the device table'),
        ({"gpu": ""}, "gpu is empty"),
        ({"tp": "", "pp": ""}, "the layout is not known: tp, pp are empty"),
        ({"dp": "3"}, "dp × tp × pp × cp = 12 is not n_gpus = 16"),
        ({"dp": "", "tp": "3"}, "the given axes make 6, which does not divide n_gpus = 16"),
        ({"global_batch": ""}, "global_batch is empty"),
        ({"global_batch": "62"}, "global_batch = 62 is no multiple of dp = 4"),
        ({"micro_batch": "3"}, "micro_batch = 3 does not divide global_batch / dp = 64 / 4 = 16"),
        ({"dtype": "int3"}, 'dtype = "int3" is none of'),
        ({"recompute": "some"}, 'recompute = "some" is none of'),
        ({"model": "thing", "n_layers": ""}, 'the sizes of "thing" are not given'),
        ({"model": "thing", "heads": "7"}, "its sizes make no model"),
        ({"n_gpus": "", "dp": ""}, "n_gpus is empty"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    assert reason in refusal(tmp_path, **changes)


def test_sizes_of_known_models_need_not_be_given(tmp_path: Path) -> None:
    blank = dict.fromkeys(("n_layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "params_b"), "")
    assert case(tmp_path, **blank).profile.num_parameters == case(tmp_path).profile.num_parameters


def test_years_and_frameworks() -> None:
    rows = read_rows(PUBLISHED_RUNS)
    found = {(row.run.family, history_of(row.run).name, year_of(row.run)) for row in rows}
    for expected in (
        ("megatron-sc21", "megatron-lm", 2021),
        ("megatron-bridge", "megatron-bridge", 2026),
        ("nemo-launcher", "nemo", 2024),
        ("mlperf", "mlperf", 2023),
        ("vtrain", "megatron-deepspeed", 2022),
        ("torchtitan", "torchtitan", 2025),
    ):
        assert expected in found


def test_measured_time_from_each_figure(tmp_path: Path) -> None:
    found = case(tmp_path)
    flops = step_flops(found.profile, found.run, "causal")
    assert flops == pytest.approx(model_flops(found.profile) * 64)
    full = step_flops(found.profile, found.run, "full")
    assert full is not None
    for changes, seconds in (
        ({"step_time_s": "4"}, 4.0),
        ({"tokens_per_s_per_gpu": "8192"}, 64 * 8192 / (8192 * 16)),
        ({"model_tflops_per_gpu": "400"}, full / (400e12 * 16)),
        ({"mfu": "0.4"}, full / (0.4 * 989e12 * 16)),
    ):
        row = read(tmp_path, **changes)
        assert measured_step(row, found.profile, found.cluster, "bf16") == pytest.approx(seconds)
    assert measured_step(read(tmp_path), found.profile, found.cluster, "bf16") is None


def test_printed_times_agree_with_printed_throughput(tmp_path: Path) -> None:
    """Sources that print time, throughput and FLOP/s confirm the conventions."""
    agree = 0
    rows = read_rows(write(tmp_path / "runs.csv", shipped(families=["nemo", "megatron-lm", "llm-foundry"])))
    for row, found in zip(rows, cases_of([row.run for row in rows]), strict=True):
        measured = row.measured
        if isinstance(found, Case) and measured.tokens_per_second and measured.model_teraflops and row.run.global_batch:
            flops = step_flops(found.profile, row.run, history_of(row.run).flops)
            assert flops is not None
            tokens = row.run.global_batch * found.profile.sequence_length
            rate = flops / tokens * measured.tokens_per_second
            agree += abs(rate / (measured.model_teraflops * 1e12) - 1) < 0.05
    assert agree >= 120


def test_a_row_may_name_its_schedule_and_its_attention(tmp_path: Path) -> None:
    words = {"ZB-2p": "zero_bubble_2p", "ZB-1p": "interleaved_zero_bubble", "1F1B": "1f1b", "gpipe": "gpipe"}
    for word, schedule in words.items():
        assert case(tmp_path, schedule=word).layouts[0].schedule == schedule
    assert case(tmp_path, schedule="1F1B-I", vpp="4").layouts[0].chunks == 4
    assert case(tmp_path, attention="unfused").framework.flash_attention is False
    assert case(tmp_path, attention="fused", source="a page of 2019").framework.flash_attention is True
    assert 'schedule = "ZB-9p" is none of gpipe, 1f1b' in refusal(tmp_path, schedule="ZB-9p")
    assert 'attention = "quick" is neither fused nor unfused' in refusal(tmp_path, attention="quick")


def test_what_a_row_names_changes_its_price(tmp_path: Path) -> None:
    """ZB-2p fills the pipeline with twice the microbatches and leaves no bubble; scores are kept where written."""
    changes = {"pp": "8", "tp": "1", "dp": "2", "sp": "0", "global_batch": "64", "zero_stage": "0"}
    words = ({}, {"schedule": "1F1B"}, {"schedule": "ZB-1p"}, {"schedule": "ZB-2p"}, {"attention": "unfused"})
    rows = [{**LLAMA, **changes, "schedule": "", "attention": "", **word} for word in words]
    plain, same, once, twice, unfused = (
        outcome.forecast for outcome in validate(write(tmp_path / "runs.csv", rows), "fitted").outcomes
    )
    assert plain.step_seconds == same.step_seconds
    assert (once.step_seconds or 0) > (twice.step_seconds or 0)
    assert (twice.peak_gibibytes or 0) > 1.3 * (once.peak_gibibytes or 0)
    assert (unfused.peak_gibibytes or 0) > 1.3 * (plain.peak_gibibytes or 0)
    assert (unfused.step_seconds or 0) > 1.05 * (plain.step_seconds or 0)


@pytest.mark.parametrize(
    ("layers", "each"),
    [(24, (12, 14)), (24, (8, 9, 9)), (24, (5, 7, 7, 7)), (32, (16, 18)), (32, (7, 9, 9, 9)),
     (32, (3, 5, 5, 5, 4, 4, 4, 4))],
)  # fmt: skip
def test_deepspeed_shares_its_layers_out_evenly(tmp_path: Path, layers: int, each: tuple[int, ...]) -> None:
    """Sailor's plans list the layers of each stage, embedding and head among them."""
    changes = {"source_family": "sailor", "n_layers": str(layers), "pp": str(len(each)), "params_b": ""}
    found = case(tmp_path, **changes, tp="1", dp="1", n_gpus=str(len(each)), zero_stage="0", vpp="1")
    cuts = found.layouts[0].cuts or ()
    starts, ends = (0, *cuts), (*cuts, layers)
    blocks = [stop - start for start, stop in zip(starts, ends, strict=True)]
    assert (blocks[0] + 1, *blocks[1:-1], blocks[-1] + 1) == each


def test_benchmarks_force_even_routing(tmp_path: Path) -> None:
    """Megatron-Bridge's page says so of its mixtures; a technical report trains."""
    assert case(tmp_path, source_family="megatron-bridge").framework.balances_experts
    assert not case(tmp_path, source_family="deepseek-v3-technical-report").framework.balances_experts


def test_a_schedule_of_another_system_is_priced_and_makes_no_plan(tmp_path: Path) -> None:
    (layout,) = case(tmp_path, schedule="ZB-2p").layouts
    with pytest.raises(PlanError, match='is priced, not run. Use schedule = "interleaved_zero_bubble"'):
        plan_of(layout, global_batch_size=64)


def test_what_is_known_better_than_the_table() -> None:
    p3 = named_cluster("v100-16gb", 4, 8, memory_bytes=16 << 30, network_bytes_per_second=25e9 / 8)
    network = p3.links[1]
    assert network.bandwidth_bytes_per_second == 25e9 / 64
    assert network.alone_bytes_per_second == 25e9 / 8  # the node's one card
    dgx = named_cluster("a100", 4, 8, network_bytes_per_second=200e9)
    assert dgx.links == parse_cluster_spec("4x8xa100").links
    assert named_cluster("h100-sxm", 1, 8, scale_up_bytes_per_second=1e11).links[0].bandwidth_bytes_per_second == 1e11
