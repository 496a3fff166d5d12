"""Models of which most is frozen: what the description says of it, and what a rank is predicted to hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from drawn_folders import small_model

from weft.analysis.blueprint import build_blueprint
from weft.api import describe_recipe
from weft.config.recipe import Recipe, parse_recipe
from weft.model.profile import Profile
from weft.planning.price import Memories
from weft.techniques.cost_terms import WEFT, Layout

pytest.importorskip("peft", reason="the package peft is not installed: `make setup` does")


def drawn_adapters() -> Iterator[tuple[str, str]]:
    draw = random.Random(29)
    for base in ("", "int8", "nf4"):
        targets = draw.sample(["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], draw.randint(1, 4))
        kind = f'base = "{base}"\n' if base else ""
        yield base, f"{kind}rank = {draw.choice((1, 3, 8))}\ntargets = {targets!r}".replace("'", '"')


def recipe(folder: Path, adapter: str) -> Recipe:
    return parse_recipe(
        f"""
        [model]
        hf = "{folder}"
        sequence_length = 16
        {adapter and "[model.adapter]"}
        {adapter}
        [data]
        train = [{{ source = "synthetic" }}]
        [batch]
        global_batch_size = 8
        [optimizer]
        learning_rate = 0.001
        [run]
        steps = 1
        """
    )


def layout_of(profile: Profile) -> Layout:
    """AdamW in fp32 on one rank."""
    return Layout(
        precision="fp32",
        gradient_bytes=4,
        master_bytes=8,
        trained_share=profile.trained_share,
        coded_share=profile.coded_share,
        code_bytes=profile.code_bytes,
    )


@pytest.mark.parametrize(("base", "adapter"), [*drawn_adapters()])
def test_a_rank_is_predicted_to_hold_what_the_model_has(base: str, adapter: str, tmp_path: Path) -> None:
    import transformers

    small_model(transformers.AutoModelForCausalLM, "llama").save_pretrained(tmp_path / "base")
    what = recipe(tmp_path / "base", adapter)
    profile = describe_recipe(what).profile
    parameters = list(build_blueprint(what).module.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    held = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    assert 0 < trained < 0.5 * sum(parameter.numel() for parameter in parameters)
    assert (profile.coded_share > 0) == bool(base)
    kinds = Memories(profile, WEFT, on_accelerator=False).of(layout_of(profile), None)[0].kinds
    assert kinds.weights == pytest.approx(held)
    assert kinds.optimizer == pytest.approx(8 * trained)
    copies = WEFT.memory.gradient_copies
    assert kinds.gradients == pytest.approx(4 * trained * (1 + copies))
