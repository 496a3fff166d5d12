"""`weft plan` answers: what a choice costs, what would help, other launchers, pictures, a dry run, the schema."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from weft.cli import run
from weft.config.plan import load_plan

DEMO = Path(__file__).parents[2] / "examples" / "demo"
RECIPE = str(DEMO / "recipe.toml")
ELSEWHERE = ("plan", RECIPE, "--cluster", "8xh100", "--top", "2")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 0
    return capsys.readouterr().out


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 2
    return capsys.readouterr().err


def test_the_best_plan_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    text = said(capsys, *ELSEWHERE, "--next", "--why-not", "tensor=2", "--plots", str(folder))
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["time"].startswith("time      ideal ")
    assert "margin" in lines["memory"]
    assert "tokens per second" in lines["next"]
    assert "tensor = 2" in lines["why not"]
    assert {path.name for path in folder.iterdir()} == {"waterfall.png", "memory.png", "timeline.png", "map.png"}


def test_for_another_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    pins = ("--set", "plan.mesh.tensor=2", "--set", "plan.data_parallel.zero=1", "--set", "plan.mesh.pipeline=1")
    text = said(capsys, *ELSEWHERE, *pins, "--emit", "megatron")
    assert "--tensor-model-parallel-size 2" in text
    assert "--num-layers 4" in text
    assert "--swiglu" in text


def test_what_search_does_not_choose_stands_in_the_plan_and_that_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = tmp_path / "plan.toml"
    permitted = ("--set", 'recipe.permit.compression=["topk"]', "--set", "plan.data_parallel.compression=topk")
    text = said(
        capsys, *ELSEWHERE, *permitted, "--set", "plan.data_parallel.topk_share=0.2", "--set",
        "plan.compute.threads_per_rank=3", "--output", str(written),
    )  # fmt: skip
    assert "given     data_parallel.topk_share: in the plans, and not in their prices" in text
    plan = load_plan(written)
    assert (plan.data_parallel.topk_share, plan.compute.threads_per_rank) == (0.2, 3)


def test_a_plan_that_cannot_be_run_yet_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("plan", RECIPE, "--plan", str(DEMO / "plan.toml"))
    assert "refuses" not in said(capsys, *given)
    text = said(capsys, *given, "--set", "plan.memory.offload=activations", "--set", "plan.compute.compile=true")
    refusal = 'plan.memory.offload = "activations" cannot join compute.compile'
    assert f"note      weft train refuses it: {refusal}" in text


def test_a_choice_that_training_refuses_is_refused_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    given = (*ELSEWHERE, "--set", "recipe.optimizer.name=lamb", "--why-not", "scheme=2d, tensor=4, size=2")
    text = said(capsys, *given)
    why = 'plan.tensor_parallel.scheme = "2d" cannot be had with optimizer.name = "lamb", which looks at whole tensors.'
    assert f'cannot be changed alone: {why} Use "1d".' in text
    assert f"that fits can be trained, whatever else is changed: {why}" in text


def test_where_all_plans_are_refused_the_commonest_reason_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ('recipe.permit.compression=["fp8"]', "plan.data_parallel.compression=fp8", "plan.mesh.replicate=8")
    given = (*ELSEWHERE, *(each for text in asked for each in ("--set", text)))
    text = said(capsys, *given)
    assert "are refused; the commonest reason:" in text
    assert 'plan.data_parallel.compression = "fp8" can be predicted but not run yet' in text
    assert "--dry-run runs ranks of the best plan, and none was found" in complaint(capsys, *given, "--dry-run")


def test_a_permission_that_would_help_is_named_though_it_is_refused_now(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *ELSEWHERE, "--set", 'recipe.permit.precision=["fp32"]', "--next")
    assert re.search(r'permit.precision with "bf16".*more tokens per second', text), text


def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan", RECIPE, "--plan", str(DEMO / "plan.toml"), "--dry-run", "--rank", "7")
    assert "rank      7 of 8 (pipeline 1, replicate 1, tensor 1)" in text
    assert "agree     rank 7 and" in text


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said(capsys, "plan", "--schema"))["title"] == "Weft plan"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((RECIPE, "--rank", "3"), "--rank"),
        ((*ELSEWHERE[1:], "--set", "plan.microbatch.per_step=2"), "Give microbatch.size, or a whole plan"),
        ((*ELSEWHERE[1:], "--set", "plan.data_parallel={zero=1}"), "is not one setting"),
        ((RECIPE, "--plan", str(DEMO / "plan.toml"), "--dry-run", "--rank", "8"), "outside the plan's world of 8"),
        ((RECIPE, "--json", "--next"), "--json"),
        (("--model", "llama-3.1-8b", "--cluster", "8xh100", "--dry-run"), "--dry-run, which needs a recipe"),
        ((RECIPE, "--cluster", "8xh100", "--emit", "megatorn"), "Did you mean megatron?"),
        ((RECIPE, "--cluster", "8xh100", "--why-not", "tensro=2"), "Did you mean tensor?"),
        ((RECIPE, "--cluster", "8xh100", "--plots", "/proc/absent"), "--plots /proc/absent"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    assert message in complaint(capsys, "plan", *arguments)


SMALL = ("plan", "--model", "llama-3.2-1b", "--cluster", "8xa100", "--global-batch-size", "32", "--set",
         "plan.mesh.context=1")  # fmt: skip


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("megatron", ("pretrain_gpt.py", "--swiglu", "--global-batch-size 32")),
        ("torchtitan", ("torchtitan", "torchrun")),
        ("deepspeed", ("deepspeed", "train_micro_batch_size_per_gpu")),
        ("accelerate", ("accelerate launch",)),
    ],
)
def test_a_plan_within_another_system(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, system: str, words: tuple[str, ...]
) -> None:
    text = said(capsys, *SMALL, "--for", system, "--write-to", str(tmp_path / "job"))
    assert "Weft's best plan" in text, "the difference in time is said"
    assert "not run yet" not in text, "what Weft cannot run is no matter for another system"
    for word in words:
        assert word in text
    files = [path for path in (tmp_path / "job").rglob("*") if path.is_file()]
    assert files
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        if path.suffix == ".py":
            compile(path.read_text(), str(path), "exec")


def test_a_plan_that_a_system_cannot_run_gets_reasons_and_the_nearest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[mesh]\nshard = 8\n[data_parallel]\nzero = 3\n[microbatch]\nsize = 2\nper_step = 2\n"
                    '[compute]\nprecision = "bf16"\n')  # fmt: skip
    text = said(capsys, *SMALL[:-2], "--plan", str(path), "--for", "megatron")
    assert "cannot    " in text
    assert "the given plan" in text
    assert "pretrain_gpt.py" in text
    text = said(capsys, *SMALL[:-2], "--plan", str(path))
    assert "llama-3.2-1b" in text
    path.write_text(path.read_text().replace("size = 2\nper_step = 2", "size = 4\nper_step = 1"))
    text = complaint(capsys, "plan", "--model", "llama-3.1-70b", "--cluster", "8xa100", "--global-batch-size", "32",
                     "--plan", str(path))  # fmt: skip
    assert "GiB may be filled" in text


def test_no_figure_has_an_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(4)
    models = draw.sample(("gpt2", "gpt2-xl", "llama-3.2-1b", "llama-2-13b", "megatron-7.5b"), 3)
    clusters = draw.sample(("2xcpu", "1x8xcpu", "1xv100", "2x8xh100", "8xa100-40gb"), 3)
    for model, cluster in zip(models, clusters, strict=True):
        options = ("plan", "--model", model, "--cluster", cluster, "--global-batch-size", "64", "--top", "3", "--next")
        assert run(list(options)) == 0
        shown = capsys.readouterr()
        assert not re.search(r"\de[+-]\d", shown.out + shown.err), f"{model} on {cluster}"
