"""A session trains a model that `peft` has put adapters into, and exports what `PeftModel.from_pretrained` loads."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import CheckpointError

peft: Any = pytest.importorskip("peft", reason="the package peft is not installed: `make setup` does")

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False},
    "lora and a head": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "dora": {"r": 4, "target_modules": ["q_proj", "fc2"], "use_dora": True, "init_lora_weights": False},
    "ia3": {"target_modules": ["k_proj", "fc2"], "feedforward_modules": ["fc2"]},
    "prompts": {"num_virtual_tokens": 3},
    "prompts of an encoder": {"num_virtual_tokens": 3, "encoder_hidden_size": 8},
}
KINDS = {"ia3": "IA3Config", "prompts": "PromptTuningConfig", "prompts of an encoder": "PromptEncoderConfig"}
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "data": {"mesh": MeshPlan(replicate=2)},
    "zero3": {"mesh": MeshPlan(shard=2), "data_parallel": DataParallelPlan(zero=3)},
    "tensor": {"mesh": MeshPlan(tensor=2)},
    "pipeline": {"mesh": MeshPlan(pipeline=2)},
}


@contextmanager
def quietly() -> Iterator[None]:
    """Leave out what peft's own use of transformers is told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def no_bars() -> Iterator[None]:
    """Without progress bars, which leave a semaphore."""
    import transformers

    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.enable_progress_bar()


def loaded(base: str, folder: Path) -> Any:
    with quietly():
        return peft.PeftModel.from_pretrained(base_model(base), folder).double()


def base_model(folder: str) -> Any:
    import transformers

    with no_bars():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def adapted(folder: str, method: str) -> Any:
    torch.manual_seed(1)
    config = getattr(peft, KINDS.get(method, "LoraConfig"))(task_type="CAUSAL_LM", **METHODS[method])
    with quietly():
        return peft.get_peft_model(base_model(folder), config).double()


def rows() -> Tensor:
    return torch.randint(0, 64, (12, 10), generator=torch.Generator().manual_seed(3))


def loss_fn(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    logits = outputs.logits[:, -batch["input_ids"].shape[1] :][:, :-1]
    targets = batch["input_ids"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=rows()).logits


def trained_plainly(model: Any) -> Tensor:
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for batch in rows().split(4):
        optimizer.zero_grad()
        total, count = loss_fn(model(input_ids=batch), {"input_ids": batch})
        (total / count).backward()
        optimizer.step()
    return logits_of(model)


def train_and_export(base: str, method: str, world: int, folder: str, how: str = "get_peft_model", **plan: Any) -> None:
    size = 4 // (world if "mesh" in plan and plan["mesh"].data > 1 else 1)
    whole = Plan(microbatch=MicrobatchPlan(size=size), compute=ComputePlan(precision="fp64"), **plan)
    with weft.session(plan=whole, permit=("fp64",), record=False, folder=f"{folder}-run", quiet=True) as session:
        model = adapted(base, method) if how == "get_peft_model" else injected(base, method, how)
        optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        loader = DataLoader([{"input_ids": row} for row in rows()], batch_size=4)  # type: ignore[arg-type]
        state = session.prepare(model, optimizer, loader, loss=loss_fn, inputs={"input_ids": "input_ids"})
        for batch in state.batches():
            state.step(batch)
        state.export(folder)


def injected(base: str, method: str, how: str) -> Any:
    torch.manual_seed(1)
    config = getattr(peft, KINDS.get(method, "LoraConfig"))(task_type="CAUSAL_LM", **METHODS[method])
    model = base_model(base)
    if how == "add_adapter":
        model.add_adapter(config)
        return model
    with quietly():
        return peft.inject_adapter_in_model(config, model)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    import transformers

    torch.manual_seed(0)
    config = transformers.PhiConfig(  # norms of Llama compute in fp32
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        resid_pdrop=0.0,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("base")
    with no_bars():
        transformers.PhiForCausalLM(config).save_pretrained(folder)
    return str(folder)


EVERYWHERE = [
    *(("lora", plan) for plan in PLANS),
    ("ia3", "one"),
    *((each, "zero3") for each in METHODS if each != "lora"),
]


@pytest.mark.parametrize(("method", "plan"), EVERYWHERE)
def test_the_export_of_adapters_gives_the_logits_of_plain_training(
    ranks: RankPool, tmp_path: Path, base: str, method: str, plan: str
) -> None:
    world = 1 if plan == "one" else 2
    folder = tmp_path / "export"
    ranks.run(world, train_and_export, base, method, world, str(folder), **PLANS[plan])
    model = adapted(base, method)
    before = logits_of(model)
    wanted = trained_plainly(model)
    found = logits_of(loaded(base, folder))
    scale = wanted.abs().max()
    assert (wanted - before).abs().max() > 1e-3 * scale
    assert (found - wanted).abs().max() <= (1e-6 if "prompts" in method else 1e-10) * scale  # peft loads them in fp32
    assert not (folder / "config.json").exists()
    with quietly():
        model.save_pretrained(tmp_path / "theirs")
    theirs, ours = (load_file(each / "adapter_model.safetensors") for each in (tmp_path / "theirs", folder))
    assert ours.keys() == theirs.keys()
    for name, each in theirs.items():
        assert (ours[name] - each).abs().max() <= 1e-10 * max(each.abs().max(), 1e-3), name
    configs = [json.loads((each / "adapter_config.json").read_text()) for each in (tmp_path / "theirs", folder)]
    for config in configs:  # sets, in the order of their hashes
        for key, value in config.items():
            config[key] = sorted(value) if isinstance(value, list) else value
    assert configs[0] == configs[1]


@pytest.mark.parametrize("how", ["inject"])
def test_adapters_in_a_model_of_ones_own_are_exported_alone(
    ranks: RankPool, tmp_path: Path, base: str, how: str
) -> None:
    folder = tmp_path / "export"
    ranks.run(2, train_and_export, base, "lora", 2, str(folder), how, **PLANS["zero3"])
    wanted = trained_plainly(adapted(base, "lora"))
    found = logits_of(loaded(base, folder))
    assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()
    assert (folder / "adapter_config.json").is_file()
    assert not (folder / "config.json").exists()


def test_what_a_pipeline_cannot_save_is_refused(ranks: RankPool, tmp_path: Path, base: str) -> None:
    with pytest.raises(CheckpointError, match=r"modules_to_save .* from a session without mesh\.pipeline"):
        ranks.run(2, train_and_export, base, "lora and a head", 2, str(tmp_path / "export"), **PLANS["pipeline"])
    assert not (tmp_path / "export").exists()


def test_what_is_trained_beside_the_adapters_is_named(
    tmp_path: Path, base: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Plan(microbatch=MicrobatchPlan(size=4), compute=ComputePlan(precision="fp64"))
    with weft.session(plan=plan, permit=("fp64",), folder=tmp_path / "run", quiet=True) as session:
        model = adapted(base, "lora")
        model.base_model.model.model.final_layernorm.weight.requires_grad_(True)
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        loader = DataLoader([{"input_ids": row} for row in rows()], batch_size=4)  # type: ignore[arg-type]
        state = session.prepare(model, optimizer, loader, loss=loss_fn, inputs={"input_ids": "input_ids"})
        with caplog.at_level(logging.WARNING):
            state.export(tmp_path / "export")
    (line,) = (each.getMessage() for each in caplog.records if "are not exported" in each.getMessage())
    assert line.startswith("1 trained parameters are not exported")
    assert "model.final_layernorm.weight" in line
    assert "modules_to_save" in line
