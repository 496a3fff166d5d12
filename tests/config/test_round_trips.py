"""What is written is read back equal, and reads well."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noun_examples import PLAN, RECIPE, recipe_of

from weft.config.cluster import Cluster, dump_cluster, parse_cluster, parse_cluster_spec
from weft.config.document import dotted, format_value
from weft.config.document._locate import locate
from weft.config.plan import (
    AXES,
    ComputePlan,
    ContextParallelPlan,
    DataParallelPlan,
    MemoryPlan,
    MeshPlan,
    MicrobatchPlan,
    PipelineParallelPlan,
    Plan,
    TensorParallelPlan,
    dump_plan,
    parse_plan,
)
from weft.config.recipe import (
    BatchRecipe,
    ConvNetShape,
    DataRecipe,
    DataSource,
    DecoderShape,
    MlpShape,
    ModelRecipe,
    OptimizerRecipe,
    ParameterGroup,
    PermitRecipe,
    Recipe,
    RunRecipe,
    dump_recipe,
    parse_recipe,
)

sizes = st.integers(1, 10**12)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
below_one = st.floats(0, 1, exclude_max=True)
scalars = st.one_of(texts, st.integers(-(2**63) + 1, 2**63 - 1), st.booleans(), st.floats(allow_nan=False))


def some(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def decoders() -> st.SearchStrategy[DecoderShape]:
    def build(groups: int, per_group: int, width: int, more: dict[str, Any]) -> DecoderShape:
        heads = groups * per_group
        return DecoderShape(hidden_size=2 * width * heads, num_heads=heads, num_kv_heads=groups, **more)

    more = st.fixed_dictionaries(
        {
            "num_layers": sizes,
            "ffn_size": some(sizes),
            "vocabulary_size": st.integers(2, 10**6),
            "sequence_length": sizes,
            "tie_embeddings": st.booleans(),
            "dropout": below_one,
            "rope_theta": positive,
            "norm_epsilon": positive,
        }
    )
    return st.builds(build, st.integers(1, 9), st.integers(1, 9), st.integers(1, 99), more)


shapes = st.one_of(
    decoders(),
    st.builds(
        MlpShape,
        num_layers=sizes,
        input_size=sizes,
        hidden_size=sizes,
        num_classes=sizes,
        ffn_size=some(sizes),
        dropout=below_one,
    ),
    st.builds(ConvNetShape, num_layers=sizes, channels=sizes, norm=st.sampled_from(["batch", "group"])),
)
models = st.one_of(
    st.builds(ModelRecipe, shape=shapes, freeze=st.lists(texts).map(tuple)),
    st.builds(ModelRecipe, hf=texts, sequence_length=some(sizes), split=st.dictionaries(texts, st.just("column"))),
    st.builds(
        ModelRecipe,
        factory=st.just("a.b:c"),
        arguments=st.dictionaries(st.text("aü. \"\\'\n#[]=", max_size=9), scalars),
    ),
)
sources = st.builds(DataSource, source=texts, weight=positive)
optimizers = st.one_of(
    st.builds(
        OptimizerRecipe,
        learning_rate=positive,
        betas=st.tuples(below_one, below_one),
        max_grad_norm=some(positive),
        groups=st.lists(st.builds(ParameterGroup, match=texts, weight_decay=some(st.floats(0, 1)))).map(tuple),
    ),
    st.builds(
        OptimizerRecipe,
        name=st.sampled_from(["sgd", "lars"]),
        momentum=below_one,
        schedule=st.sampled_from(["linear", "cosine"]),
        final_learning_rate_ratio=st.floats(0, 1),
        batch_scaling=st.just("linear"),
        base_batch_size=sizes,
    ),
)
recipes = st.builds(
    Recipe,
    model=models,
    data=st.builds(DataRecipe, train=st.lists(sources, min_size=1).map(tuple), tokenizer=some(texts)),
    batch=st.builds(BatchRecipe, global_batch_size=sizes),
    optimizer=optimizers,
    run=st.builds(RunRecipe, steps=sizes, seed=st.integers(0, 2**63 - 1), evaluate_every=some(sizes)),
    permit=st.builds(
        PermitRecipe, precision=st.sampled_from([("fp32",), ("bf16", "fp16")]), staleness=st.integers(0, 2**63 - 1)
    ),
    origins=st.just({}),
)
words = st.sampled_from(["none", "selective", "full"])
plans = st.builds(
    Plan,
    mesh=st.builds(MeshPlan, pipeline=sizes, tensor=sizes, shard=sizes, order=st.permutations(AXES).map(tuple)),
    data_parallel=st.builds(DataParallelPlan, zero=st.integers(0, 3), bucket_bytes=st.integers(1_048_576, 10**12)),
    tensor_parallel=st.builds(TensorParallelPlan, scheme=st.sampled_from(["1d", "2.5d"]), sequence=st.booleans()),
    context_parallel=st.builds(ContextParallelPlan, scheme=st.sampled_from(["ring", "ulysses"])),
    pipeline_parallel=st.builds(PipelineParallelPlan, cuts=some(st.sets(sizes).map(lambda s: tuple(sorted(s))))),
    microbatch=st.builds(MicrobatchPlan, size=sizes, per_step=sizes | st.lists(sizes, min_size=1).map(tuple)),
    memory=st.builds(MemoryPlan, recompute=words | st.lists(words, min_size=1).map(tuple), fused_loss=st.booleans()),
    compute=st.builds(ComputePlan, precision=st.sampled_from(["fp32", "bf16"]), compile=st.booleans()),
    origins=st.just({}),
)


@settings(max_examples=150, deadline=None)
@given(recipes, st.booleans())
def test_a_recipe_is_read_back_equal(recipe: Recipe, everything: bool) -> None:
    read = parse_recipe(dump_recipe(recipe, everything=everything))
    assert read == recipe
    assert hash(read) == hash(recipe)
    assert read.digest == recipe.digest


@settings(max_examples=150, deadline=None)
@given(plans, st.booleans())
def test_a_plan_is_read_back_equal(plan: Plan, everything: bool) -> None:
    read = parse_plan(dump_plan(plan, {"mesh.tensor": "fast links"}, header=["chosen by hand"], everything=everything))
    assert read == plan
    assert hash(read) == hash(plan)
    assert read.digest == plan.digest


@settings(deadline=None)
@given(scalars | st.lists(scalars) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), scalars))
def test_every_value_is_spelt_exactly(value: Any) -> None:
    read = tomllib.loads(f"value = {format_value(value)}")["value"]
    assert read == value
    assert type(read) is type(value)


@settings(deadline=None)
@given(recipes)
def test_every_setting_is_located_on_its_line(recipe: Recipe) -> None:
    text = dump_recipe(recipe)
    lines = text.split("\n")
    for path, line in locate(text).items():
        last = path[-1]
        assert isinstance(last, int) or dotted((last,)) in lines[line - 1]


@pytest.mark.parametrize("spec", ["4x8xh100", "h200", "2x3xcpu", "8xmi300x", "2048x8xb200"])
def test_a_cluster_is_read_back_equal(spec: str) -> None:
    cluster = parse_cluster_spec(spec)
    assert parse_cluster(dump_cluster(cluster)) == cluster
    assert parse_cluster(dump_cluster(cluster, everything=True)) == cluster
    assert parse_cluster(dump_cluster(Cluster.detect())) == Cluster.detect()


def test_places_of_nested_and_quoted_settings() -> None:
    text = '[[a.list]]\nx = 1\n\n[[a.list]]\n"y.z" = [\n  { k = """\n[no]\n""" },\n  { k = 2 }, # c\n]\n'
    text += "[a.list.sub]\nv.w = 3\n"
    tomllib.loads(text)
    lines = locate(text)
    assert lines["a", "list", 0, "x"] == 2
    assert lines["a", "list", 1, "y.z"] == 5
    assert lines["a", "list", 1, "y.z", 0, "k"] == 6
    assert lines["a", "list", 1, "y.z", 1, "k"] == 9
    assert lines["a", "list", 1, "sub", "v", "w"] == 12


def test_a_recipe_is_written_with_what_matters_and_why() -> None:
    text = dump_recipe(parse_recipe(RECIPE), {"batch.global_batch_size": "as in the paper"})
    assert "global_batch_size = 64  # as in the paper" in text
    assert "num_layers = 12  # Blocks." in text
    assert 'train = [{ source = "stdlib", weight = 1.0 }, { source = "more", weight = 0.5 }]' in text
    assert "seed" not in text
    assert "seed = 1234" in dump_recipe(parse_recipe(RECIPE), everything=True)
    assert "# Samples (sequences, images) per optimizer step" in dump_recipe(parse_recipe(RECIPE))


def test_a_plan_is_written_with_its_header_and_reasons() -> None:
    text = dump_plan(parse_plan(PLAN), {"mesh.tensor": "two fast cores"}, header=["chosen for recipe 7f3a"])
    assert text.startswith("# chosen for recipe 7f3a\n")
    assert "tensor = 2  # two fast cores" in text
    assert "cuts = [7]" in text
    assert "bucket_bytes" not in text  # the default
    assert "bucket_bytes = 26_214_400" in dump_plan(Plan(), everything=True)


def test_none_can_be_said_where_it_is_not_the_default() -> None:
    recipe = parse_recipe(RECIPE, ["recipe.optimizer.max_grad_norm=none"])
    assert recipe.optimizer.max_grad_norm is None
    assert parse_recipe(dump_recipe(recipe)) == recipe


def test_digests_name_content_not_origin() -> None:
    recipe = recipe_of()
    assert len(recipe.digest) == 12
    assert dataclasses.replace(recipe, origins={"run.steps": "--set"}).digest == recipe.digest
    assert dataclasses.replace(recipe, run=RunRecipe(steps=11)).digest != recipe.digest
    assert Plan().digest != Plan(mesh=MeshPlan(tensor=2)).digest


def test_whole_numbers_stand_for_floats_and_lists_for_tuples() -> None:
    optimizer = OptimizerRecipe(learning_rate=1, betas=[0, 0.5])  # pyright: ignore[reportArgumentType]
    assert optimizer.learning_rate == 1.0
    assert isinstance(optimizer.learning_rate, float)
    assert optimizer.betas == (0.0, 0.5)
    assert MicrobatchPlan(per_step=[1, 2]).per_step == (1, 2)  # pyright: ignore[reportArgumentType]
