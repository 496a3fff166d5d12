"""Plans for other systems: what `--for` proposes passes their recorded checks, and says the plan and the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from readers import read

from weft.config.cluster import Cluster, parse_cluster_spec
from weft.errors import PlanError
from weft.interop.systems import SYSTEMS, Emission, SystemJob, emit, find_system, job_of, node_size, search_within
from weft.model.profile import ModelSizes, profile_of_sizes
from weft.model.profile.known import KNOWN_MODELS, known_model
from weft.planning.search import SearchResult, Space, search, space_of
from weft.techniques.cost_terms import DATASHEET, FITTED, Layout

MODELS = (
    "gpt2-xl", "megatron-7.5b", "llama-2-13b", "llama-3.1-8b", "llama-3.2-3b", "qwen2.5-7b", "qwen3-8b", "mistral-7b",
    "nemotron-4-15b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite",
)  # fmt: skip
CLUSTERS = ("8xh100", "2x8xh100", "4x8xh100", "3x8xa100-40gb", "16x8xh100")
SIZES = known_model("llama-3.1-8b").sizes
JOB = SystemJob(
    sizes=SIZES,
    layout=Layout(replicate=8, microbatches=4, fused_loss=True),
    global_batch_size=32,
    sequence_length=8192,
    devices_per_node=8,
)


def _found(
    name: str, sizes: ModelSizes, cluster: Cluster, batch: int
) -> tuple[SearchResult, list[tuple[SystemJob, Emission]]]:
    profile = profile_of_sizes(sizes)
    space = replace(space_of(profile, cluster, global_batch_size=batch), node_size=node_size(cluster))
    asked: Callable[[Space], SearchResult] = lambda part: search(  # noqa: E731
        profile, cluster, global_batch_size=batch, space=part, top=2
    )
    result = search_within(SYSTEMS[name], sizes, space, asked).result
    jobs = [job_of(result, each, sizes) for each in result.best]
    return result, [(job, emit(SYSTEMS[name], job)) for job in jobs]


def _expected(sizes: ModelSizes) -> dict[str, Any]:
    biases = {(True, True, True): "all", (True, False, False): "qkv", (False, False, False): "none"}
    return {
        "layers": sizes.num_layers,
        "hidden": sizes.hidden_size,
        "heads": sizes.num_heads,
        "kv_heads": sizes.kv_heads,
        "vocabulary": sizes.vocabulary_size,
        "norm": sizes.norm,
        "epsilon": sizes.norm_epsilon,
        "biases": biases.get((sizes.qkv_bias, sizes.output_bias, sizes.ffn_bias)),
        "dropout": (sizes.dropout, sizes.attention_dropout),
        "tied": sizes.tied,
        "rotary": sizes.rotary_base if sizes.rotary else None,
        "fraction": sizes.rotary_fraction,
        "window": sizes.window,
        "experts": (sizes.num_experts, sizes.top_k, sizes.expert_ffn_size),
        "latent": sizes.kv_rank,
        "gated": sizes.is_gated,
        "qk_norm": sizes.qk_norm == "head" or bool(sizes.kv_rank),
    }


def _check(job: SystemJob, emission: Emission) -> None:
    """The command means the plan: axes, batch, stages, and the model that is trained."""
    said, layout = read(emission), job.layout
    assert said.world == layout.world_size == said.pipeline * said.tensor * said.context * said.data
    for axis in ("pipeline", "tensor", "context", "expert", "data"):
        assert getattr(said, axis) == getattr(layout, axis), axis
    if layout.data > 1:
        assert said.zero == layout.zero
        assert layout.zero != 3 or (said.shard, said.replicate) == (layout.shard, layout.replicate)
    assert (said.microbatch, said.microbatches) == (layout.microbatch_size, layout.microbatches)
    assert said.global_batch == job.global_batch_size == said.microbatch * said.microbatches * said.data
    assert said.length == job.sequence_length
    if layout.pipeline > 1:
        assert said.stages == tuple(map(len, job.stages))
        assert sum(said.stages) == job.sizes.num_layers
        assert len(said.stages) == layout.num_stages
    expected = _expected(job.sizes)
    assert said.model == {name: expected[name] for name in said.model}


def _sweep(name: str, model: str, spec: str, batch: int) -> bool:
    sizes = known_model(model).sizes
    try:
        result, pairs = _found(name, sizes, parse_cluster_spec(spec), batch)
    except PlanError as refusal:
        reason = str(refusal)
        if "has no words for" not in reason and "has no plan for" not in reason:
            raise
        return False
    assert result.best
    for job, emission in pairs:
        _check(job, emission)
    return True


@pytest.mark.parametrize("model", MODELS)
def test_what_is_proposed_is_what_is_said(model: str) -> None:
    """On a cluster that is drawn by the model's name, for all systems."""
    draw = random.Random(model)
    spec, batch = draw.choice(CLUSTERS[:3]), draw.choice((32, 48, 64))
    assert sum(_sweep(name, model, spec, batch) for name in SYSTEMS) >= 1


@pytest.mark.parametrize("spec", CLUSTERS)
@pytest.mark.parametrize("name", list(SYSTEMS))
def test_every_model_on_every_cluster(name: str, spec: str) -> None:
    assert sum(_sweep(name, model, spec, batch) for model in MODELS for batch in (96, 512)) >= 2


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_every_aspect_of_a_model_is_said_or_refused(name: str) -> None:
    """One aspect of the model is changed at a time: the system's words change with it, or it is refused, and never is
    another model trained in silence."""
    changes: list[dict[str, Any]] = [
        {"norm": "layer"}, {"norm_bias": True}, {"norm_epsilon": 3e-6}, {"norm_placement": "both"},
        {"norm_placement": "parallel"}, {"norm_placement": "after"}, {"qkv_bias": True}, {"output_bias": True},
        {"ffn_bias": True}, {"qkv_bias": True, "output_bias": True, "ffn_bias": True}, {"dropout": 0.2},
        {"attention_dropout": 0.2}, {"rotary_base": 12_345.0}, {"rotary_fraction": 0.5},
        {"rotary": False, "learned_positions": 8192}, {"rotary": False}, {"activation": "gelu"}, {"activation": "relu"},
        {"activation": "geglu"}, {"activation": "squared_relu"}, {"qk_norm": "head"}, {"qk_norm": "full"},
        {"window": 512}, {"window": 512, "full_attention_every": 2}, {"attention_sinks": True}, {"tied": True},
        {"head_size": 64}, {"num_kv_heads": 4}, {"value_head_size": 64}, {"stem_norm": True}, {"head_bias": True},
        {"causal": False}, {"num_experts": 8, "top_k": 2, "expert_ffn_size": 1024},
        {"num_experts": 8, "top_k": 2, "expert_ffn_size": 1024, "expert_every": 2},
        {"num_experts": 8, "top_k": 2, "expert_ffn_size": 1024, "shared_ffn_size": 1024},
        {"num_experts": 8, "top_k": 2, "expert_ffn_size": 1024, "router_bias": True},
        {"vocabulary_size": 64_000}, {"ffn_size": 8192},
    ]  # fmt: skip
    system = SYSTEMS[name]
    layout = replace(JOB.layout, fused_loss=name in ("megatron", "torchtitan"))
    job = replace(JOB, layout=layout)
    plain = emit(system, job)
    messages = 0
    for change in changes:
        other = replace(job, sizes=replace(SIZES, **change))
        try:
            emission = emit(system, other)
        except PlanError as refusal:
            reason = str(refusal)
            assert "cannot train" in reason  # noqa: PT017 - most of the changes are refused, some are not
            continue
        messages += 1
        assert (emission.command, emission.files) != (plain.command, plain.files), change
        _check(other, emission)
    assert messages >= 4


@pytest.mark.parametrize(("name", "words"), [("megatron", "core attention alone"), ("torchtitan", "every second")])
def test_another_selective_recomputation_is_said(name: str, words: str) -> None:
    for recompute in ("none", "selective", "full"):
        job = replace(JOB, layout=replace(JOB.layout, zero=1 if name == "megatron" else 3, recompute=recompute))
        said = any(words in note for note in emit(SYSTEMS[name], job).notes)
        assert said == (recompute == "selective")


def test_what_a_system_cannot_do_is_refused() -> None:
    layout = replace(JOB.layout, pipeline=4, replicate=2, zero=1, microbatches=16)
    job = replace(JOB, layout=layout, cuts=(8, 16, 24))
    emit(SYSTEMS["megatron"], job)
    reasons = (("torchtitan", "ZeRO-1"), ("deepspeed", "a pipeline"), ("accelerate", "pipeline"))
    for name, reason in reasons:
        with pytest.raises(PlanError, match=reason):
            emit(SYSTEMS[name], job)
    for changes, reason in (
        ({"schedule": "zbv", "chunks": 2}, "schedule zbv"),
        ({"local_steps": 50}, "replicas that average every 50 steps"),
        ({"zero": 3, "replicate": 1, "shard": 2}, "ZeRO-3"),
        ({"compression": "powersgd"}, "compressed by powersgd"),
        ({"recompute": ("full",) * 32}, "differs from block to block"),
        ({"offload": "optimizer"}, "offloaded optimizer"),
    ):
        with pytest.raises(PlanError, match=reason):
            emit(SYSTEMS["megatron"], replace(job, layout=replace(layout, **changes)))  # pyright: ignore[reportArgumentType]
    shared = replace(JOB.layout, replicate=4, microbatches=8, context=2, context_scheme="all_gather", zero=0)
    with pytest.raises(PlanError, match="shards over the context ranks"):
        emit(SYSTEMS["torchtitan"], replace(JOB, layout=shared))
    emit(SYSTEMS["torchtitan"], replace(JOB, layout=replace(shared, zero=3)))
    with pytest.raises(PlanError, match="unequal shares"):
        emit(SYSTEMS["megatron"], replace(job, shares=(17, 15)))
    with pytest.raises(PlanError, match=r"Did you mean megatron\?"):
        find_system("megatorn")


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_the_recorded_checks_find_what_is_wrong(name: str) -> None:
    """A command that is altered afterwards is refused: the check reads it, and not the plan."""
    system = SYSTEMS[name]
    job = replace(JOB, layout=replace(JOB.layout, fused_loss=name in ("megatron", "torchtitan")))
    emission = emit(system, job)
    assert not list(system.check(emission, job))
    wrong: list[Emission] = []
    if name == "megatron":
        wrong.append(replace(emission, command=(*emission.command, "--no-such-flag")))
        wrong.append(replace(emission, command=(*emission.command, "--tensor-model-parallel-size", "3")))
        wrong.append(replace(emission, command=(*emission.command, "--normalization", "BatchNorm")))
        wrong.append(replace(emission, command=(*emission.command, "--micro-batch-size", "two")))
        split = (*emission.command, "--tensor-model-parallel-size", "2")
        wrong.append(replace(emission, command=split, environment={}))
    elif name == "deepspeed":
        files = dict(emission.files)
        for before, after in (('"stage": 0', '"stage": 4'), ('"stage": 0', '"stag": 0'), ("batch_size", "batchsize")):
            wrong.append(
                replace(emission, files={**files, "deepspeed.json": files["deepspeed.json"].replace(before, after)})
            )
    elif name == "accelerate":
        files = dict(emission.files)
        for before, after in (
            ('"MULTI_GPU"', '"NO"'),
            ('"num_machines": 1', '"num_machines": 2'),
            ("use_cpu", "use_cup"),
        ):
            wrong.append(
                replace(emission, files={**files, "accelerate.json": files["accelerate.json"].replace(before, after)})
            )
    for each in wrong:
        assert list(system.check(each, job)), each
    if name == "torchtitan":
        assert list(system.check(emission, replace(job, global_batch_size=33)))


def test_the_nearest_plan_keeps_what_it_can() -> None:
    cluster, profile = parse_cluster_spec("2x8xh100"), profile_of_sizes(SIZES)
    space = replace(space_of(profile, cluster, global_batch_size=16), node_size=8)
    asked = partial(search, profile, cluster, calibration=FITTED)

    def found(name: str, near: Layout) -> tuple[tuple[str, ...], Layout]:
        nearest = search_within(
            SYSTEMS[name], SIZES, space, lambda part: asked(space=part, global_batch_size=16), near=near
        )
        return nearest.kept, nearest.result.best[0].layout

    near = Layout(pipeline=4, tensor=2, replicate=2, schedule="zbv", chunks=2, zero=1, microbatches=8)
    kept, layout = found("megatron", near)
    assert kept == ("pipeline", "tensor", "context", "expert")
    assert (layout.pipeline, layout.tensor) == (4, 2)
    kept, layout = found("deepspeed", near)
    assert kept == ("tensor",)
    assert layout.tensor == 2
    assert found("accelerate", near)[0] == ()
    assert DATASHEET is not FITTED


def test_facts_name_their_version_and_source() -> None:
    for name, system in SYSTEMS.items():
        assert system.facts.system == name
        assert system.facts.version.lstrip("core_v")[0].isdigit()
        assert system.facts.source
        assert system.facts.checks
    assert set(SYSTEMS) == {"megatron", "torchtitan", "deepspeed", "accelerate"}
    assert len(KNOWN_MODELS) > 100
