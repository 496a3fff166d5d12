"""`weft.Plan.fsdp(tensor=2)`: plans by the names that people know, and what ranks and batch fill in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from noun_examples import recipe_of

import weft
from weft.api.planning.requested import requested_plan as requested
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan, filled_in, over_ranks
from weft.errors import PlanError


def written(zero: Any = 1, precision: Any = "fp32", size: int = 1, per_step: int = 1, **axes: Any) -> Plan:
    return Plan(
        mesh=MeshPlan(**axes),
        data_parallel=DataParallelPlan(zero=zero),
        compute=ComputePlan(precision=precision),
        microbatch=MicrobatchPlan(size=size, per_step=per_step),
    )


FORMS: dict[str, tuple[Plan, Plan, Plan]] = {
    # As it is written, and what it is on 8 ranks with a batch of 32.
    "ddp": (Plan.ddp(), written(0), written(0, replicate=8, size=4)),
    "fsdp": (Plan.fsdp(), written(3), written(3, shard=8, size=4)),
    "zero": (Plan.zero(2), written(2), written(2, replicate=8, size=4)),
    "tensor": (Plan.tensor(2), written(tensor=2), written(tensor=2, replicate=4, size=8)),
    "pipeline": (Plan.pipeline(2), written(pipeline=2), written(pipeline=2, replicate=4, size=4, per_step=2)),
    "context": (Plan.context(2), written(context=2), written(context=2, replicate=4, size=8)),
    "expert": (Plan.expert(2), written(expert=2), written(expert=2, shard=8, size=4)),
    "copies of shards": (Plan.fsdp(replicate=2), written(3, replicate=2), written(3, replicate=2, shard=4, size=4)),
    "shards that are copied": (Plan.fsdp(shard=2), written(3, shard=2), written(3, replicate=4, shard=2, size=4)),
    "all at once": (
        Plan.fsdp(tensor=2, pipeline=2, microbatches=4, precision="bf16"),
        written(3, "bf16", tensor=2, pipeline=2, per_step=4),
        written(3, "bf16", tensor=2, pipeline=2, shard=2, size=4, per_step=4),
    ),
    "accumulation": (Plan.ddp(microbatches=2), written(0, per_step=2), written(0, replicate=8, size=2, per_step=2)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_the_plan_written_out(form: str) -> None:
    plan, says, runs = FORMS[form]
    assert plan == says
    recipe = recipe_of()
    recipe = replace(recipe, batch=replace(recipe.batch, global_batch_size=32))
    full = filled_in(over_ranks(plan, 8), recipe)
    assert full == runs
    assert full == filled_in(over_ranks(says, 8), recipe), "equal plans are filled in alike"
    assert full.global_batch_size == 32
    assert full.origins["microbatch.size"] == f"a batch of 32 over {full.mesh.data} data ranks"
    assert filled_in(over_ranks(full, 8), recipe) == full


def test_what_a_plan_says_is_left_as_it_is() -> None:
    assert over_ranks(Plan.ddp(replicate=1), 4) == written(0), "one data rank was asked for"
    assert over_ranks(Plan.ddp(replicate=2), 4) == written(0, replicate=2), "the check says that they do not fit"
    assert over_ranks(Plan.tensor(3), 4) == written(tensor=3)
    assert over_ranks(Plan.fsdp(shard=2, replicate=1), 4) == written(3, shard=2)
    for none in (0, -4, 1):
        assert over_ranks(Plan.fsdp(), none) == written(3)
    assert over_ranks(Plan.fsdp(), None) == written(3), "nobody knows the ranks"
    assert over_ranks(Plan.fsdp(), None, num_accelerators=4) == written(3, shard=4)
    on_processors = replace(Plan.fsdp(), compute=ComputePlan(device="cpu"))
    assert over_ranks(on_processors, None, num_accelerators=4) == on_processors
    assert over_ranks(Plan.fsdp(), 2, num_accelerators=4) == written(3, shard=2)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a letter": (lambda: Plan.fsdp(tensr=2), "Plan.fsdp() knows no tensr=. Did you mean tensor?"),  # type: ignore[call-arg]
    "a word": (lambda: Plan.ddp(color=1), "knows no color=. Of a plan it takes zero, "),  # type: ignore[call-arg]
    "another stage": (lambda: Plan.fsdp(zero=2), "says zero = 3, and zero = 2 beside it. Leave one out."),
    "another number": (lambda: Plan.tensor(2, tensor=4), "says tensor = 2, and tensor = 4 beside it."),
    "a stage too many": (lambda: Plan.zero(4), "Plan.zero(4): zero = 4 is not one of 0, 1, 2, 3."),  # type: ignore[arg-type]
    "a text": (lambda: Plan.tensor("2"), 'tensor = "2" is not a whole number. Write 2, without quotes.'),  # type: ignore[arg-type]
    "none": (lambda: Plan.ddp(microbatches=0), "Plan.ddp(): microbatches = 0 is too small: use 1 or more."),
    "a precision": (lambda: Plan.ddp(precision="bf61"), "Did you mean bf16?"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_says_nothing_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        call()
    assert message in str(caught.value)


def test_a_call_is_given_a_plan_or_keywords() -> None:
    assert requested("weft.train", None, {}) == "auto"
    assert requested("weft.train", "auto", {"precision": "bf16"}) == "auto", "auto may be narrowed"
    assert requested("weft.train", None, {"zero": 3, "tensor": 2}) == Plan.fsdp(tensor=2)
    assert requested("weft.train", Plan.ddp(), {}) == Plan.ddp()
    twice = r"^weft.session\(plan=…, zero=3\) says twice how to split. Leave one out, or give settings="
    with pytest.raises(PlanError, match=twice):
        requested("weft.session", Plan.ddp(), {"microbatches": 2, "zero": 3}, ["settings"])
    with pytest.raises(
        PlanError, match=r'^weft.train\(plan="auto", tensor=2\) says twice how to split. Leave one out.$'
    ):
        requested("weft.train", "auto", {"tensor": 2}, ["processes"])
    with pytest.raises(PlanError, match=r"\(plan=…, microbatches=2\) says twice"):
        requested("weft.train", Plan.ddp(), {"microbatches": 2})


def test_other_arguments_of_a_call_are_meant_too() -> None:
    with pytest.raises(PlanError, match=r"weft.session\(\) knows no quite=. Did you mean quiet\?"):
        weft.session(quite=True)  # type: ignore[call-arg]
    with pytest.raises(PlanError, match=r"weft.train\(\) knows no process=. Did you mean processes\?"):
        weft.train("recipe.toml", process=2)  # type: ignore[call-arg]
    with pytest.raises(PlanError, match=r"weft.train\(precision=…\) does not say how to split"):
        weft.train(recipe_of(), precision="bf16")
