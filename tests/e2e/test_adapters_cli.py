"""A folder of `transformers`, fine-tuned by adapters at the command line, continues text as `peft` has it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_kit import WEFT, watch, write_corpus

peft: Any = pytest.importorskip("peft", reason="the package peft is not installed: `make setup` does")

RECIPE = """
[model]
hf = "base"
sequence_length = 32
[model.adapter]
rank = 8
targets = ["q_proj", "v_proj", "down_proj"]
{settings}
[data]
train = [{{ source = "corpus" }}]
cache = "cache"
[batch]
global_batch_size = 8
[optimizer]
learning_rate = 3e-2
[run]
steps = 30
"""
PROMPT = "text 3 says"
TOKENS = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose text adapters can change."""
    import transformers

    folder = tmp_path_factory.mktemp("home")
    write_corpus(folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")
    return folder


@pytest.mark.parametrize("settings", ["", "settings = { use_dora = true }"])
def test_generate_continues_as_the_merged_adapters_do(home: Path, settings: str) -> None:
    import transformers

    name = "dora" if settings else "lora"
    (home / f"{name}.toml").write_text(RECIPE.format(settings=settings))
    (home / "plan.toml").write_text("[mesh]\ntensor = 2\n[microbatch]\nper_step = 8\n")
    run = home / name
    done = watch((WEFT, "train", f"{name}.toml", "--plan", "plan.toml", "--run-folder", name), home)
    assert done.status == 0, done.text
    said = watch((WEFT, "generate", name, "--prompt", PROMPT, "--tokens", str(TOKENS), "--temperature", "0"), home)
    assert said.status == 0, said.text
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(run / "tokenizer.json"))
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    base = transformers.AutoModelForCausalLM.from_pretrained(home / "base").eval()
    options = {"do_sample": False, "max_new_tokens": TOKENS, "pad_token_id": 0}
    before = tokenizer.decode(base.generate(ids, **options)[0], skip_special_tokens=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what peft reads of transformers
        merged = peft.PeftModel.from_pretrained(base, run / "export").merge_and_unload()
    after = tokenizer.decode(merged.generate(ids, **options)[0], skip_special_tokens=True)
    assert after != before
    assert said.text.strip().endswith(after.strip()), (said.text, after)
