"""The error of predicted memory is kept free, once; cores offload nothing; default batches are affordable."""

from __future__ import annotations

import random
from typing import get_args, get_type_hints

import pytest

from weft.config.cluster import Cluster, parse_cluster_spec
from weft.config.plan import Plan, parse_plan
from weft.config.recipe import OptimizerRecipe
from weft.errors import ClusterError, PlanError
from weft.model.profile import profile_of_sizes
from weft.model.profile.known import KNOWN_MODELS
from weft.planning.explain import memory_line
from weft.planning.price import Memories, check_layout, model_flops
from weft.planning.search import default_batch, pinned, search, space_of
from weft.techniques.cost_terms import Layout

CORES = parse_cluster_spec("1x4xcpu")


@pytest.mark.parametrize("spec", ["8xa100-40gb", "8xh100", "4xcpu", "4xtpu-v5e"])
def test_what_fits_leaves_the_margin(spec: str) -> None:
    cluster = parse_cluster_spec(spec)
    profile = profile_of_sizes(KNOWN_MODELS["gpt2" if spec == "4xcpu" else "llama-2-7b"].sizes, 1024)
    result = search(profile, cluster, global_batch_size=32)
    assert result.best, "7B on 8 × 40 GB is what everybody trains"
    margin = 0.04 if spec == "4xcpu" else 0.06
    for candidate in result.best:
        found = candidate.prediction
        assert found.fullest.device <= (1 - margin) * cluster.device_memory_bytes + 1
        assert found.device_bytes == pytest.approx(cluster.device_memory_bytes)
        assert "margin" in memory_line(found)


def test_the_margin_is_a_setting_of_the_cluster() -> None:
    cluster = parse_cluster_spec("8xh100")
    assert cluster.usable_memory_bytes == pytest.approx(0.94 * cluster.device_memory_bytes)
    whole = Cluster(nodes=cluster.nodes, links=cluster.links, memory_margin=0.0)
    assert whole.usable_memory_bytes == whole.device_memory_bytes
    for wrong in (-0.1, 1.0):
        with pytest.raises(ClusterError, match="memory_margin"):
            Cluster(nodes=cluster.nodes, links=cluster.links, memory_margin=wrong)


def test_devices_are_as_large_as_drivers_show() -> None:
    """`nvidia-smi`: 81559 MiB of an H100 of 80 GB, 40960 of an A100 of 40, 143771 of an H200, 183359 of a B200."""
    for kind, shown in (("h100", 81559), ("a100-40gb", 40960), ("h200", 143771), ("b200", 183359)):
        assert parse_cluster_spec(f"8x{kind}").device_memory_bytes == pytest.approx(shown * 2**20, rel=0.015)


def test_cores_offload_nothing() -> None:
    profile = profile_of_sizes(KNOWN_MODELS["gpt2"].sizes)
    space = space_of(profile, CORES, global_batch_size=8)
    assert space.offloads == ("none",)
    for kind in ("optimizer", "activations"):
        layout = Layout(precision="fp32", offload=kind)  # pyright: ignore[reportArgumentType]
        memories = Memories(profile, on_accelerator=False)
        assert memories.fullest(layout) == memories.fullest(Layout(precision="fp32"))
        assert any("nothing would get smaller" in problem for problem in check_layout(profile, CORES, layout))
        asked = pinned(space, _given(kind))
        with pytest.raises(PlanError, match="nothing would get smaller"):
            search(profile, CORES, global_batch_size=8, space=asked)


def _given(kind: str) -> Plan:
    return parse_plan(f'[memory]\noffload = "{kind}"\n')


def test_default_batches_of_cores_take_no_hour() -> None:
    draw = random.Random(11)
    for name in draw.sample(sorted(KNOWN_MODELS), 12):
        profile = profile_of_sizes(KNOWN_MODELS[name].sizes)
        for cores in (2, 16, 128):
            cluster = parse_cluster_spec(f"1x{cores}xcpu")
            batch = default_batch(profile, cluster)
            peak = cores * max(cluster.nodes[0].devices.peak_flops.values())
            assert batch.samples == 1 or batch.samples * model_flops(profile) <= 15 * peak
            assert "30 s" in batch.reason
    assert default_batch(profile_of_sizes(KNOWN_MODELS["gpt2"].sizes), parse_cluster_spec("8xh100")).samples == 1024


def test_every_optimizer_has_its_moments() -> None:
    names = get_args(get_type_hints(OptimizerRecipe)["name"])
    assert [OptimizerRecipe(name=name).moments for name in names] == [2, 1, 0, 2, 1]
