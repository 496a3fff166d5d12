"""Bad input: each error names file, line, key and value, says why, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from noun_examples import PLAN, RECIPE

from weft.config.cluster import load_cluster, parse_cluster, parse_cluster_spec, resolve_cluster
from weft.config.plan import MeshPlan, load_plan, parse_plan
from weft.config.recipe import BatchRecipe, DecoderShape, ModelRecipe, OptimizerRecipe, load_recipe, parse_recipe
from weft.errors import ClusterError, PlanError, RecipeError, WeftError
from weft.techniques.check import runnability

RECIPES: list[tuple[str, str, str]] = [
    (
        "global_batch_size",
        "global_batch_sise",
        "recipe.toml, line 16: batch.global_batch_sise is not a setting. Did you mean global_batch_size?",
    ),
    ("[batch]", "[bach]", "recipe.toml, line 15: bach is not a setting. Did you mean batch?"),
    (
        "[batch]",
        "[zzz]",
        "recipe.toml, line 15: zzz is not a setting. a recipe has model, data, batch, optimizer, run, permit.",
    ),
    ("= 64", "= 64.5", "recipe.toml, line 16: batch.global_batch_size = 64.5 is not a whole number."),
    ("= 64", "= 64.0", "batch.global_batch_size = 64.0 is not a whole number. Write 64."),
    ("= 64", '= "64"', 'batch.global_batch_size = "64" is not a whole number. Write 64, without quotes.'),
    ("= 64", "= true", "batch.global_batch_size = true is not a whole number."),
    ("= 64", "= 0", "batch.global_batch_size = 0 is too small: use 1 or more."),
    ("= 64", "= 6 4", "recipe.toml, line 16: expected newline or end of document after a statement"),
    ("global_batch_size = 64", "", "recipe.toml, line 15: batch.global_batch_size is missing. Add it to [batch]."),
    ("[run]\nsteps = 1000", "", "recipe.toml: run is missing. Add a table [run]."),
    ("3e-4", '"3e-4"', 'optimizer.learning_rate = "3e-4" is not a number. Write 0.0003, without quotes.'),
    ("3e-4", "nan", "recipe.toml, line 19: optimizer.learning_rate = nan is not a number."),
    ("3e-4", "-1", "optimizer.learning_rate = -1.0 must be a finite number above 0."),
    ("3e-4", "0.1\nname = adamw", 'line 20: invalid value, in `name = adamw`. Text needs quotes: "adamw".'),
    (
        "3e-4",
        '0.1\nname = "adam"',
        'optimizer.name = "adam" is not one of "adamw", "sgd", "adafactor", "lamb", "lars". Did you mean adamw?',
    ),
    ("3e-4", "0.1\nbetas = [0.9]", "optimizer.betas = [0.9] has 1 values where 2 are needed."),
    (
        "3e-4",
        "0.1\nbetas = [0.9, 1.0]",
        "recipe.toml, line 20: optimizer.betas[1] = 1.0 must be at least 0 and below 1.",
    ),
    (
        "3e-4",
        "0.1\nmomentum = 0.5",
        'optimizer.momentum = 0.5 is not used with name = "adamw". Remove it, or use name = "sgd" or "lars".',
    ),
    (
        "3e-4",
        '0.1\nbatch_scaling = "linear"',
        (
            'optimizer.batch_scaling = "linear" needs base_batch_size: the global '
            "batch size that learning_rate was found for."
        ),
    ),
    (
        "= 100\n",
        "= 1001\n",
        "line 21: optimizer.warmup_steps = 1001 is longer than run.steps = 1000. Use 1000 or less.",
    ),
    (
        "num_heads = 8",
        "num_heads = 7",
        "recipe.toml, line 6: model.num_heads = 7 does not divide hidden_size = 512. Use 4 or 8.",
    ),
    (
        "num_kv_heads = 4",
        "num_kv_heads = 3",
        "line 7: model.num_kv_heads = 3 does not divide num_heads = 8. Use 2 or 4.",
    ),
    (
        "num_heads = 8",
        "num_heads = 512",
        (
            "model.num_heads = 512 makes heads of 1 features, and rotary positions "
            "turn pairs of them. Use num_heads = 256."
        ),
    ),
    ('"decoder"', '"decoderr"', 'model.reference = "decoderr" is not one of'),
    ('"decoder"', '"mlp"', 'model.num_heads is a setting only with reference = "decoder", "encoder".'),
    (
        'reference = "decoder"',
        'reference = "decoder"\nhf = "x"',
        'model.hf = "x" stands beside reference: a model has one of them. Remove the other.',
    ),
    (
        "[data]",
        '[model.split]\n"blocks.*" = "colum"\n[data]',
        'recipe.toml, line 10: model.split."blocks.*" = "colum" is not one of',
    ),
    ("0.5 }", "0 }", "recipe.toml, line 12: data.train[1].weight = 0.0 must be a finite number above 0."),
    ("0.5 }", "0.5, wait = 1 }", "recipe.toml, line 12: data.train[1].wait is not a setting. Did you mean weight?"),
    (
        '["fp32", "bf16"]',
        '"fp32"',
        'permit.precision = "fp32" is not a list of one of "fp32", "fp64", "bf16", "fp16". Write ["fp32"].',
    ),
    (
        '["fp32", "bf16"]',
        '["fp32"]\ncompression = ["int9"]',
        'permit.compression[0] = "int9" is not a compression. Did you mean int8?',
    ),
    (
        "[batch]",
        "[[batch]]",
        "batch = [{ global_batch_size = 64 }] is not a table. Write [batch] and its settings below it.",
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), RECIPES, ids=[new for _, new, _ in RECIPES])
def test_a_bad_recipe_says_where_and_what_to_change(old: str, new: str, message: str) -> None:
    assert old in RECIPE
    with pytest.raises(RecipeError, match=re.escape(message)):
        parse_recipe(RECIPE.replace(old, new))


def test_one_source_is_still_a_list() -> None:
    text = RECIPE[: RECIPE.index("train")] + 'train = "stdlib"\n' + RECIPE[RECIPE.index("[batch]") :]
    message = 'data.train = "stdlib" is not a list of tables. Write train = [{ source = "stdlib" }].'
    with pytest.raises(RecipeError, match=re.escape(message)):
        parse_recipe(text)


def test_a_recipe_needs_a_model() -> None:
    message = "recipe.toml, line 1: model.reference is missing: a model has one of reference, hf and factory."
    with pytest.raises(RecipeError, match=re.escape(message)):
        parse_recipe("[model]\n[batch]\nglobal_batch_size = 1\n[run]\nsteps = 1\n")


PLANS: list[tuple[str, str, str]] = [
    ("tensor = 2", "tensor = 0", "plan.toml, line 3: mesh.tensor = 0 is too small: use 1 or more."),
    ("tensor = 2", "tensr = 2", "plan.toml, line 3: mesh.tensr is not a setting. Did you mean tensor?"),
    (
        "tensor = 2",
        'order = ["tensor"]',
        'mesh.order = ["tensor"] leaves out pipeline, replicate, shard, expert, context: it must name each of',
    ),
    ("26_214_400", "0", "data_parallel.bucket_bytes = 0 is too small: use 1 or more."),
    ("[7]", "[7, 7]", "pipeline_parallel.cuts = [7, 7] must rise"),
    (
        "[7]",
        '["7"]',
        'plan.toml, line 9: pipeline_parallel.cuts[0] = "7" is not a whole number. Write 7, without quotes.',
    ),
    ("= 16", "= [4, 0]", "microbatch.per_step = [4, 0] must give each data rank at least 1 microbatch."),
    ("= 16", '= "many"', 'microbatch.per_step = "many" is neither a whole number nor a list of whole numbers.'),
    ('"selective"', '"selctive"', "Did you mean selective?"),
    (
        '"selective"',
        '["full", "selctive"]',
        'memory.recompute[1] = "selctive" is not one of "none", "selective", "full".',
    ),
    ("26_214_400", "1\nfirst_bucket_bytes = 2", "data_parallel.first_bucket_bytes = 2 is more than bucket_bytes = 1."),
    ("26_214_400", '1\nzero = "3"', 'data_parallel.zero = "3" is not one of 0, 1, 2, 3. Write 3, without quotes.'),
    (
        "26_214_400",
        '1\nalgorithm = "ring;"',
        'data_parallel.algorithm = "ring;" is neither "auto" nor "measured" nor a list by size',
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), PLANS, ids=[new for _, new, _ in PLANS])
def test_a_bad_plan_says_where_and_what_to_change(old: str, new: str, message: str) -> None:
    assert old in PLAN
    with pytest.raises(PlanError, match=re.escape(message)):
        parse_plan(PLAN.replace(old, new))


@pytest.mark.parametrize(
    ("load", "error", "noun"),
    [(load_recipe, RecipeError, "recipe"), (load_plan, PlanError, "plan"), (load_cluster, ClusterError, "cluster")],
)
def test_files_that_cannot_be_read(
    tmp_path: Path,
    load: Callable[[Path], object],
    error: type[WeftError],
    noun: str,
) -> None:
    (tmp_path / "recipe.toml").write_bytes(b"ok = 1\nbad = '\xff'\n")
    with pytest.raises(
        error, match=re.escape("recipe.toml, line 2: byte 0xff is not UTF-8 text. Save the file as UTF-8.")
    ):
        load(tmp_path / "recipe.toml")
    with pytest.raises(error, match=re.escape("recip.toml does not exist. Did you mean recipe.toml?")):
        load(tmp_path / "recip.toml")
    with pytest.raises(error, match=re.escape("zzz.toml does not exist.") + ".* holds recipe.toml"):
        load(tmp_path / "zzz.toml")
    with pytest.raises(error, match="does not exist: there is no folder"):
        load(tmp_path / "nowhere" / "recipe.toml")
    with pytest.raises(error, match="does not exist: there is no folder"):
        load(tmp_path / "recipe.toml" / "recipe.toml")
    with pytest.raises(error, match=rf"is a folder, not a {noun} file. It holds recipe.toml."):
        load(tmp_path)
    # Root, who runs some test machines, may read every file; the first byte of this one not even root.
    (tmp_path / "broken.toml").symlink_to("/proc/self/mem")
    with pytest.raises(error, match="broken.toml cannot be read: Input/output error."):
        load(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("4x8xh10", 'cluster = "4x8xh10": h10 is not in the device table. Did you mean h100?'),
        ("ax8xh100", "is neither NODESxDEVICESxKIND nor DEVICESxKIND. Write for example 4x8xh100."),
        ("1x2x3xcpu", "is neither NODESxDEVICESxKIND"),
        ("0xh100", "is neither NODESxDEVICESxKIND"),
        ("8", "8 is not in the device table. Known are v100, v100-16gb, a100, "),
        ("2x8xh100+4x8xa10", "a10 is not in the device table. Did you mean a100?"),
        ("2x8xh100+", "nothing is not in the device table."),
        ("", "nothing is not in the device table."),
        ("no-such-file.toml", "no-such-file.toml does not exist."),
    ],
)
def test_bad_cluster_specs(spec: str, message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        resolve_cluster(spec)


def test_bad_cluster_files() -> None:
    text = "[[nodes]]\ncores = 2\nmemory_bytes = 1_000\n[nodes.devices]\nkind = 'cpu'\ncount = {}\nmemory_bytes = 9\n"
    with pytest.raises(ClusterError, match=re.escape("cluster.toml, line 6: nodes[0].devices.count = 0 is too small")):
        parse_cluster(text.format(0))
    link = "[[links]]\nname = 'a'\ndevices = {}\nlatency_seconds = 0\nbandwidth_bytes_per_second = 1\n"
    with pytest.raises(
        ClusterError, match=re.escape("links[0].devices = 2 leaves out devices: the last tier must join")
    ):
        parse_cluster(text.format(3) + link.format(2))
    with pytest.raises(
        ClusterError, match=re.escape("links[1].devices = 3 must be more than the 3 of the tier before it")
    ):
        parse_cluster(text.format(3) + link.format(3) + link.format(3))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('topology = "tori"', 'line 13: links[0].topology = "tori" is not one of "switch", "fully_connected", "ring"'),
        ('topology = "torus"', "links[0].shape = [] is empty: give the axes of the torus, such as [4]."),
        ('topology = "torus"\nshape = [2, 3]', "line 14: links[0].shape = [2, 3] has 6 units, which do not divide"),
        ('topology = "torus"\nshape = [4, 0]', "line 14: links[0].shape[1] = 0 is too small: use 1 or more."),
        ("shape = [4]", 'line 13: links[0].shape = [4] is a setting of topology = "torus" only'),
        ("oversubscription = 2", 'links[0].oversubscription = 2.0 is a setting of topology = "tree" only'),
        ("oversubscription = 0.5", "links[0].oversubscription = 0.5 is too small: use 1 or more."),
        ("alone_bytes_per_second = 0.5", "is less than bandwidth_bytes_per_second = 1: leave it out."),
        (
            "measured = [{ kind = 'all_reduce', members = 1, size_bytes = 1, seconds = 1 }]",
            "measured[0].members = 1 is",
        ),
    ],
)
def test_bad_links(more: str, message: str) -> None:
    text = "[[nodes]]\ncores = 4\nmemory_bytes = 9\n[nodes.devices]\nkind = 'cpu'\ncount = 4\nmemory_bytes = 9\n"
    text += "[[links]]\nname = 'a'\ndevices = 4\nlatency_seconds = 0\nbandwidth_bytes_per_second = 1\n"
    with pytest.raises(ClusterError, match=re.escape(message)):
        parse_cluster(text + more + "\n")


def test_python_is_checked_as_strictly_as_files() -> None:
    with pytest.raises(RecipeError, match="^global_batch_size = 0 is too small: use 1 or more.$"):
        BatchRecipe(global_batch_size=0)
    with pytest.raises(RecipeError, match='^learning_rate = "fast" is not a number.$'):
        OptimizerRecipe(learning_rate="fast")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="^pipeline = 0 is too small"):
        MeshPlan(pipeline=0)
    shape = DecoderShape(num_layers=1, hidden_size=8, num_heads=2)
    assert ModelRecipe(shape=shape).reference == "decoder"
    with pytest.raises(
        RecipeError, match=re.escape('reference = "mlp" needs shape = MlpShape(...), and has DecoderShape.')
    ):
        ModelRecipe(reference="mlp", shape=shape)
    with pytest.raises(RecipeError, match="sequence_length = 4 belongs in the shape of a reference model. Remove it."):
        ModelRecipe(shape=shape, sequence_length=4)
    with pytest.raises(RecipeError, match='factory = "build" is not "package.module:function".'):
        ModelRecipe(factory="build")
    with pytest.raises(
        RecipeError, match=re.escape("arguments = { a = 1 } are arguments of a factory, and this model has none")
    ):
        ModelRecipe(shape=shape, arguments={"a": 1})
    with pytest.raises(RecipeError, match=r"loss = \"token\" is neither one of .* Did you mean tokens\?"):
        ModelRecipe(factory="a:b", loss="token")


def test_every_error_is_one_short_paragraph() -> None:
    for text, make in ((RECIPE, parse_recipe), (PLAN, parse_plan)):
        with pytest.raises(WeftError) as caught:
            make(text.replace("= ", "= [[[", 1))
        assert len(str(caught.value)) < 400
    assert parse_cluster_spec("4X8XH100").num_devices == 32


def test_shared_memory_is_refused_where_tensors_are_on_an_accelerator() -> None:
    assert parse_plan('[compute]\nbackend = "weft"\n').compute.backend == "weft"
    message = r'line 3: compute\.backend = "weft" carries tensors of the CPU only.*Use "auto"'
    with pytest.raises(PlanError, match=message):
        parse_plan('[compute]\ndevice = "cuda"\nbackend = "weft"\n')


@pytest.mark.parametrize("backend", ["auto", "gloo", "weft"])
def test_an_algorithm_goes_with_every_backend(backend: str) -> None:
    plan = parse_plan(f'[data_parallel]\nalgorithm = "ring"\n[compute]\nbackend = "{backend}"\n')
    assert runnability(plan) == []
